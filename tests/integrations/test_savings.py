"""`patch(log_savings=True)` logs which part of the padded tokens was not computed."""

import logging
from collections import Counter

import pytest
import torch
from rank_processes import run_ranks
from savings_worker import Recorded, train, train_rank

import fastdpo
from fastdpo.integrations import patching
from fastdpo.integrations.savings import METRIC
from fastdpo.models import fallback

STEPS = ((0, 2), (2, 4))
"""Steps between two logs."""


def expected(ranks: list[list[tuple[int, int]]]) -> list[float]:
    """From the counters of each rank at the end of each step."""
    total = torch.tensor([[(0, 0), *of_rank] for of_rank in ranks]).sum(0).tolist()
    parts = []
    for start, end in STEPS:
        given, computed = (total[end][i] - total[start][i] for i in (0, 1))
        parts.append(1 - computed / given)
    return parts


def logged(recorded: Recorded | dict) -> list[float]:
    logs = recorded["logs"] if isinstance(recorded, dict) else recorded.logs
    return [log[METRIC] for log in logs if METRIC in log]


def test_trackers_get_the_metric_with_each_training_log(tmp_path):
    plain, recorded = train(tmp_path / "plain"), train(tmp_path / "logged", log_savings=True)
    assert logged(plain) == []
    assert logged(recorded) == pytest.approx(expected([recorded.tokens]), abs=1e-12)
    assert all(0 < part < 1 for part in logged(recorded))
    for log, other in zip(plain.logs, recorded.logs, strict=True):
        assert (METRIC in other) == ("loss" in log)
        assert log.keys() == other.keys() - {METRIC}
        assert all(log[name] == other[name] for name in log if "runtime" not in name and "per_second" not in name)


def test_it_is_the_part_of_all_ranks(tmp_path):
    run_ranks(2, train_rank, tmp_path)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert ranks[0]["tokens"] != ranks[1]["tokens"]
    for rank in ranks:
        assert logged(rank) == pytest.approx(expected([x["tokens"] for x in ranks]), abs=1e-12)
        assert logged(rank) != pytest.approx(expected([rank["tokens"]]), abs=1e-6)


def test_a_remembered_reference_computes_none_of_its_tokens(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="fastdpo")
    plain = train(tmp_path / "plain", log_savings=True)
    fastdpo.calls.clear()
    first, second = (train(tmp_path / "run", log_savings=True, reference_memory=tmp_path / "memory") for _ in range(2))
    assert logged(first) == pytest.approx(logged(plain))
    padded = [given for given, _ in plain.tokens]
    assert [given for given, _ in second.tokens] == padded, "what stock computes"
    halved = [1 - (1 - part) / 2 for part in logged(plain)]  # policy and reference compute the same tokens
    assert logged(second) == pytest.approx(halved)
    line = caplog.messages[-1]
    assert "100% of calls fused, 4 reference runs avoided, " in line


def test_it_does_not_apply_to_trainers_that_log_otherwise(monkeypatch, caplog):
    monkeypatch.setitem(patching.APPLIES, "log_savings", ())
    fastdpo.patch("trl.DPOTrainer", log_savings=True)
    assert "fastdpo: log_savings does not apply to trl.DPOTrainer" in caplog.messages
    fastdpo.unpatch()
    fastdpo.patch(log_savings=False)
    assert caplog.text.count("log_savings") == 1


def test_unpatch_restores_the_class():
    from trl import DPOTrainer

    before = {name: getattr(DPOTrainer, name) for name in ("train", "store_flos", "log")}
    with fastdpo.patched("trl.DPOTrainer", log_savings=True):
        assert all(getattr(DPOTrainer, name) is not x for name, x in before.items())
    assert all(getattr(DPOTrainer, name) is x for name, x in before.items())


def test_a_line_with_calls_that_fell_back(monkeypatch):
    calls = Counter({("x", "policy", "fused"): 3, ("x", "eval", "stock"): 1})
    monkeypatch.setattr(fallback, "calls", calls)
    assert fallback.calls_line("x") == "fastdpo: x calls: policy fused 3, eval stock 1; 75% of calls fused"
