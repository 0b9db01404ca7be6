"""Means over ranks equal those of one process, and take one collective per log."""

import json
import math

import pytest
import torch

from fastdpo.metrics import Means, PreferenceMeans
from fastdpo.ops import TokenLogps, preference_loss
from tests.support.workers.means import PAIRS, reduce_rank, update
from tests.support.workers.processes import run_ranks


def test_losses_and_rewards_that_a_trainer_has_already():
    chosen, rejected = torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -2.0])
    result = preference_loss(chosen, rejected, chosen - 1, rejected + 1)
    logged = []
    for loss, rewards in ((result, {}), (result.losses, dict(chosen_rewards=result[2], rejected_rewards=result[3]))):
        means = PreferenceMeans()
        means.update_pairs(loss, chosen, rejected, **rewards)
        logged.append({name: x for name, x in means.compute().items() if x == x})
    assert logged[0] == logged[1]
    with pytest.raises(TypeError, match=r"^PreferenceMeans: chosen_rewards must be a tensor; got None"):
        means.update_pairs(result.losses, chosen, rejected)
    with pytest.raises(ValueError, match=r"^PreferenceMeans: chosen_rewards must be None for a PreferenceLoss"):
        means.update_pairs(result, chosen, rejected, chosen_rewards=result.chosen_rewards)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_with_one_process(ranks, tmp_path):
    run_ranks(ranks, reduce_rank, tmp_path)
    alone = PreferenceMeans()
    update(alone, slice(0, PAIRS))
    expected = alone.compute()
    for rank in range(ranks):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert result["collectives"] == 1
        assert result["means"] == pytest.approx(expected, rel=1e-6)


def test_means_equal_plain_averages():
    means = PreferenceMeans()
    update(means, slice(0, PAIRS))
    means.compute()
    assert all(math.isnan(value) for value in means.compute().values()), "compute() resets the means"

    logps = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -4.0, -9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    tokens = TokenLogps(
        logps,
        entropy=torch.tensor([[1.0, 2.0, math.nan], [3.0, math.inf, math.nan]]),
        mean_logits=torch.tensor([[0.5, 1.5, 9.0], [-1.0, 9.0, 9.0]]),
        is_top1=torch.tensor([[True, False, True], [True, True, True]]),
    )
    means.update_tokens(tokens, mask)
    chosen, rejected = torch.tensor([-3.0]), torch.tensor([-3.0])
    loss = preference_loss(chosen, rejected, torch.tensor([-4.0]), torch.tensor([-2.0]))
    means.update_pairs(loss, chosen, rejected)
    result = means.compute()
    assert result.pop("loss") == pytest.approx(-math.log(1 / (1 + math.exp(-0.2))), rel=1e-6)
    assert result == pytest.approx(
        {
            "rewards/chosen": 0.1,
            "rewards/rejected": -0.1,
            "rewards/margins": 0.2,
            "rewards/accuracies": 1.0,
            "logps/chosen": -3.0,
            "logps/rejected": -3.0,
            "entropy": 2.0,
            "mean_token_accuracy": 0.5,
            "logits/chosen": 1.0,
            "logits/rejected": -1.0,
        },
        rel=1e-6,
    )


def test_many_small_values_are_summed_accurately():
    means = Means(["x"])
    for _ in range(10):
        means.update(x=torch.full((1000,), 0.1))
        means.update(x=torch.tensor(1e6))
    assert means.compute()["x"] == pytest.approx((10 * 1000 * float(torch.tensor(0.1)) + 1e7) / 10010, rel=1e-12)


def test_updates_do_not_synchronize():
    """Updates work with meta tensors, whose values cannot be read."""
    means = PreferenceMeans("meta")
    sums, mask = torch.empty(3, device="meta"), torch.empty(6, 5, device="meta")
    loss = preference_loss(sums, sums, sums, sums)
    means.update_pairs(loss, sums, sums)
    means.update_tokens(TokenLogps(mask, mask, mask, mask > 0), mask > 0)
    with pytest.raises(NotImplementedError, match="meta"):
        means.compute()


def test_no_gradient_is_kept():
    means = Means(["x"])
    means.update(x=torch.ones(3, requires_grad=True))
    assert not means._sums_and_counts.requires_grad


@pytest.mark.parametrize(
    ("shape", "entropy", "message"),
    [
        ((3, 5), (3, 5), "mask must have an even number of rows; got 3"),
        ((4, 5), (4, 1), r"tokens must have fields \[4, 5\]; got entropy \[4, 1\]"),
    ],
)
def test_tokens_that_are_no_pairs_raise(shape, entropy, message):
    tokens = TokenLogps(torch.zeros(shape), entropy=torch.ones(entropy))
    with pytest.raises(ValueError, match=f"^PreferenceMeans: {message}"):
        PreferenceMeans().update_tokens(tokens, torch.ones(shape))


def test_unknown_metrics_raise():
    with pytest.raises(ValueError, match=r"^Means: metrics must be among x, y; got z"):
        Means(["x", "y"]).update(z=torch.ones(1))


def test_tokens_without_statistics_add_nothing():
    means = PreferenceMeans()
    means.update_tokens(TokenLogps(torch.zeros(4, 5)), torch.ones(4, 5))
    means.update_weighted({})
    means.update()
    assert all(math.isnan(value) for value in means.compute().values())
