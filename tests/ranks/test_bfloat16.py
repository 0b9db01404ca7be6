"""Models that compute in bfloat16 under FSDP2 and ZeRO: fused, and no further from float32 than stock."""

import pytest
import torch
from rank_comparison import assert_calls

LOGPS = ("logps/chosen", "logps/rejected")


def errors_of_logps(run: dict, truth: dict) -> torch.Tensor:
    """The differences from the log-probabilities that a training in float32 logs, in nats."""
    both = zip(run["logs"], truth["logs"], strict=True)
    return torch.tensor([a[k] - b[k] for a, b in both for k in LOGPS if k in b])


def error_of_tensors(found: list[dict], exact: list[dict]) -> float:
    """The largest relative difference between named tensors, such as the gradients of a step."""
    errors = []
    for a, b in zip(found, exact, strict=True):
        assert a.keys() == b.keys()
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
        assert errors_of_logps(patched, truth).abs().max() < errors_of_logps(stock, truth).abs().max() / 2
        worst, stocks = (error_of_tensors(run["gradients"], truth["gradients"]) for run in (patched, stock))
        assert worst <= 1.05 * stocks
        losses = torch.tensor([log["loss"] for log in patched["logs"] if "loss" in log])
        assert not torch.equal(losses, losses.bfloat16().float())


IN_FLOAT32 = {"": "fsdp2", " lora": "fsdp2 lora"}
ZERO = {f"zero{stage} bf16{how}": exact for stage in (2, 3) for how, exact in IN_FLOAT32.items()}
"""Trainings in bfloat16, and those in float32 that they are compared with."""


@pytest.mark.parametrize("cases", [(*ZERO, *IN_FLOAT32.values())], ids=["zero"])
def test_zero_is_no_further_from_float32_than_stock(cases, ranks_of, number_of_ranks):
    """DeepSpeed rounds the weights of both trainings, which moves the few numbers of one training at random: all four
    are compared together. It exposes no gradients, but weights show them.
    """
    errors = {"stock": [], "patched": []}
    for case, exact in ZERO.items():
        for rank, truth in zip(ranks_of(case), ranks_of(exact), strict=True):
            assert_calls(rank["patched"], batches=12 // number_of_ranks, evaluated=6 // number_of_ranks)
            assert {x.dtype for x in rank["patched"]["weights"].values()} == {torch.bfloat16}
            for kind, found in errors.items():
                found.append(errors_of_logps(rank[kind], truth["stock"]))
            patched, stock = (
                error_of_tensors([rank[kind]["weights"]], [truth["stock"]["weights"]]) for kind in ("patched", "stock")
            )
            assert patched <= 1.05 * stock
    stock, patched = (torch.cat(found).square().mean().sqrt() for found in errors.values())
    assert patched <= 1.25 * stock


@pytest.mark.parametrize("case", ["fsdp2", "fsdp2 lora"])
def test_the_same_trainings_in_float32(case, ranks):
    """They are what the trainings in bfloat16 are compared with."""
    assert all(rank["stock"]["steps"] for rank in ranks)
