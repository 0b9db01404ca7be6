"""Sharded models that compute in bfloat16: fused, and nearer to float32 than stock."""

import pytest
import torch
from rank_comparison import assert_calls

LOGPS = ("logps/chosen", "logps/rejected")


def error_of_logps(run: dict, truth: dict) -> float:
    """The largest difference from the log-probabilities that a training in float32 logs, in nats."""
    return max(abs(a[k] - b[k]) for a, b in zip(run["logs"], truth["logs"], strict=True) for k in LOGPS if k in b)


def error_of_gradients(run: dict, truth: dict) -> float:
    """The largest relative difference of a step's gradient."""
    errors = []
    for a, b in zip(run["gradients"], truth["gradients"], strict=True):
        squares = [((a[name].double() - x.double()).square().sum(), x.double().square().sum()) for name, x in b.items()]
        wrong, whole = torch.tensor(squares).sum(0)
        errors.append(float((wrong / whole).sqrt()))
    return max(errors)


@pytest.mark.parametrize("case", ["fsdp2 bf16", "fsdp2 bf16 lora"])
def test_log_probabilities_are_not_rounded_to_bfloat16(case, ranks, trained, number_of_ranks):
    exact = trained[case.replace(" bf16", "")]
    for rank, truth in zip(ranks, exact, strict=True):
        stock, patched, truth = rank["stock"], rank["patched"], truth["stock"]
        assert_calls(patched, batches=12 // number_of_ranks, evaluated=6 // number_of_ranks)
        assert error_of_logps(patched, truth) < error_of_logps(stock, truth) / 2
        assert error_of_gradients(patched, truth) <= 1.05 * error_of_gradients(stock, truth)
        losses = torch.tensor([log["loss"] for log in patched["logs"] if "loss" in log])
        assert not torch.equal(losses, losses.bfloat16().float())


@pytest.mark.parametrize("case", ["fsdp2", "fsdp2 lora"])
def test_the_same_trainings_in_float32(case, ranks):
    """They are what the trainings in bfloat16 are compared with."""
    assert all(rank["stock"]["steps"] for rank in ranks)
