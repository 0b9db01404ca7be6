"""LLaMA-Factory's DPO stage: patched equals stock."""

import pytest
import torch
from llamafactory_runs import FUSED, LORA, WORKLOAD, assert_same, checkpoint, train, write_data

import fastdpo
from tests.support.comparison import assert_same_in_low_precision
from tests.support.programs.workload import as_conversations
from tests.support.trl.dpo import recorded_layouts
from tests.support.trl.grouping import recorded_orders
from tests.support.trl.verified import assert_verified

FUSED = FUSED["dpo"]
WITHOUT_REFERENCE = {("policy", "fused"): 3}

OPTIONS = {
    "as it is": {},
    "label smoothing": dict(dpo_label_smoothing=0.2),
    "hinge": dict(pref_loss="hinge"),
    "ipo": dict(pref_loss="ipo"),
    "kto_pair": dict(pref_loss="kto_pair"),
    "ftx": dict(pref_ftx=0.5),
    "bco": dict(pref_bco_weight=0.5),
    "ipo and ftx": dict(pref_loss="ipo", pref_ftx=0.5),
    "ld_alpha": dict(ld_alpha=0.3),
    "beta": dict(pref_beta=0.05),  # the tolerance of rewards is proportional to beta
    "lora": LORA,
    "dora": dict(**LORA, use_dora=True),
    "rslora and dropout": dict(**LORA, use_rslora=True, lora_dropout=0.3),
    "lora and ld_alpha": dict(**LORA, ld_alpha=0.3),
    "freeze": dict(finetuning_type="freeze", freeze_trainable_layers=1),
    "without checkpointing": dict(disable_gradient_checkpointing=True),
    "checkpointing that is not reentrant": dict(use_reentrant_gc=False),
    "eager": dict(flash_attn="disabled"),
    "cut off": dict(cutoff_len=8),
    "qwen3": dict(kind="qwen3"),
    "gemma2": dict(kind="gemma2", flash_attn="disabled"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(both, option):
    stock, patched = both(**OPTIONS[option])
    assert_same(stock, patched)
    assert patched.calls == FUSED


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "loss", [dict(pref_loss="orpo"), dict(pref_loss="simpo", simpo_gamma=0.7, pref_beta=2.0)], ids=["orpo", "simpo"]
)
def test_losses_without_a_reference(both, loss, adapter):
    stock, patched = both(**loss, **adapter)
    assert_same(stock, patched)
    assert patched.calls == WITHOUT_REFERENCE


def test_evaluation(both):
    stock, patched = both(evaluate=True)
    assert_same(stock, patched)
    assert patched.calls == {**FUSED, ("policy", "fused"): 3, ("reference", "fused"): 6, ("eval", "fused"): 3}
    assert any("eval_rewards/margins" in log for log in patched.logs)
    assert any("eval_completion_logits/chosen" in log for log in patched.logits)


def test_bf16(both):
    stock, patched = both(bf16=True, use_cpu=True)
    assert_same_in_low_precision(stock, patched, torch.bfloat16, pytest.fail)
    assert patched.calls == FUSED


@pytest.mark.parametrize(
    ("stage", "options", "calls"), [("dpo", {}, 2), ("dpo", dict(pref_loss="simpo"), 1), ("kto", {}, 3)]
)
def test_verifying(tmp_path, caplog, stage, options, calls):
    model = checkpoint(tmp_path)

    def run(directory):
        directory.mkdir()
        return train(directory, model, stage, **options)

    assert_verified(run, tmp_path, "llamafactory", "trl", caplog=caplog, calls=calls)


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
