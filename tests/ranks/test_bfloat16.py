"""Models that compute in bfloat16 under FSDP2 and ZeRO: fused, and no further from float32 than stock."""

import pytest
import torch
from rank_comparison import assert_calls

LOGPS = ("logps/chosen", "logps/rejected")


def error_of_logps(run: dict, truth: dict) -> float:
    """The largest difference from the log-probabilities that a training in float32 logs, in nats."""
    return max(abs(a[k] - b[k]) for a, b in zip(run["logs"], truth["logs"], strict=True) for k in LOGPS if k in b)


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
        assert error_of_logps(patched, truth) < error_of_logps(stock, truth) / 2
        worst, stocks = (error_of_tensors(run["gradients"], truth["gradients"]) for run in (patched, stock))
        assert worst <= 1.05 * stocks
        losses = torch.tensor([log["loss"] for log in patched["logs"] if "loss" in log])
        assert not torch.equal(losses, losses.bfloat16().float())


IN_FLOAT32 = {"": "fsdp2", " lora": "fsdp2 lora"}


@pytest.mark.parametrize("cases", [(f"zero{n} bf16{how}", exact) for n in (2, 3) for how, exact in IN_FLOAT32.items()])
def test_zero_trains_no_further_from_float32_than_stock(cases, ranks_of, number_of_ranks):
    """DeepSpeed exposes no gradients: weights show them. All weights are rounded to bfloat16."""
    for rank, exact in zip(*map(ranks_of, cases), strict=True):
        stock, patched, truth = rank["stock"], rank["patched"], exact["stock"]
        assert_calls(patched, batches=12 // number_of_ranks, evaluated=6 // number_of_ranks)
        assert {x.dtype for x in patched["weights"].values()} == {torch.bfloat16}
        assert error_of_logps(patched, truth) <= 1.05 * error_of_logps(stock, truth)
        worst, stocks = (error_of_tensors([run["weights"]], [truth["weights"]]) for run in (patched, stock))
        assert worst <= 1.05 * stocks


@pytest.mark.parametrize("case", ["fsdp2", "fsdp2 lora"])
def test_the_same_trainings_in_float32(case, ranks):
    """They are what the trainings in bfloat16 are compared with."""
    assert all(rank["stock"]["steps"] for rank in ranks)
