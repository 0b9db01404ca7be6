"""LLaMA-Factory's DPO stage in bfloat16, and with grouped prompts."""

import pytest
import torch
from llamafactory_runs import FUSED, WORKLOAD, assert_same, checkpoint, train, write_data

import fastdpo
from tests.support.comparison import assert_same_in_low_precision
from tests.support.programs.workload import as_conversations
from tests.support.trl.dpo import recorded_layouts
from tests.support.trl.grouping import recorded_orders

FUSED = FUSED["dpo"]


def test_bf16(both):
    stock, patched = both(bf16=True, use_cpu=True)
    assert_same_in_low_precision(stock, patched, torch.bfloat16, pytest.fail)
    assert patched.calls == FUSED


def test_pairs_that_begin_alike_come_together(tmp_path, monkeypatch):
    """Three batches of turns of four conversations, compared with stock ones in the same order."""
    model, pairs = checkpoint(tmp_path), as_conversations(WORKLOAD.pairs_of_text(), 3)
    orders, layouts = recorded_orders(monkeypatch), recorded_layouts(monkeypatch)

    def run(name, rows, **options):
        (tmp_path / name).mkdir()
        write_data(tmp_path / name, rows)
        return train(tmp_path / name, model, **options)

    with fastdpo.patched("llamafactory", group_prompts=True):
        patched = run("grouped", pairs)
    assert patched.calls == FUSED
    assert sorted(orders[0]) == list(range(12)) != orders[0]
    assert max(int(layout.multiplicity.max()) for layout in layouts) > 3, "turns share more than a pair does"
    assert_same(run("stock", [pairs[i] for i in orders[0]], disable_shuffling=True), patched)
