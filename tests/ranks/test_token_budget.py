"""`patch(max_tokens=...)` on several ranks: the steps, losses and weights of stock."""

from itertools import product

import pytest
import torch
from rank_cases import WHOLE_STEPS
from rank_comparison import assert_same, assert_same_weights

from tests.support.comparison import assert_same_gradients, assert_same_logs

CASES = [
    ("ddp", "token budget grouped by length"),
    *product(["ddp", "fsdp2", "zero2", "zero3"], ["token budget"]),
    *product(["ddp", "fsdp2", "zero3"], ["reward token budget"]),
    *product(["fsdp2", "zero2", "zero3"], ["SFT token budget", "KTO token budget", "GRPO token budget"]),
]


@pytest.mark.parametrize(("engine", "what"), CASES)
def test_training_equals_stock(ranks):
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert_same(stock, patched)
        assert {path for _, path in patched["calls"]} == {"fused"}
        assert patched["calls"]["policy", "fused"] > stock["steps"]
        assert patched["calls"] == ranks[0]["patched"]["calls"], "all ranks have the same number of micro-batches"
        for name, weight in patched["weights"].items():
            assert torch.equal(weight, ranks[0]["patched"]["weights"][name]), f"{name} differs between the ranks"


MERGED = {  # by case, the places of the ranks whose steps are cut
    "ddp own": [0, -1],
    **{f"ddp {x}own, watched": [-1] for x in ("", "reward ", "SFT ", "GRPO ")},
    "ddp own, out of memory": [0],
    "ddp KTO own": [],
    "fsdp2 own": [],
    "zero2 own": [],
}


@pytest.mark.parametrize("case", MERGED)
def test_each_rank_decides_by_itself_by_default(case, ranks):
    """Without a collective, so that one whose steps are cut trains next to one whose are not."""
    kept = {"ddp KTO own": "KL terms", "fsdp2 own": "FSDP, whose", "zero2 own": "DEEPSPEED, whose"}
    for rank in ranks:
        assert_same(rank["stock"], rank["patched"])
        assert {path for _, path in rank["patched"]["calls"]} == {"fused"}
        assert any(f"because of {kept[case]}" in x for x in rank["patched"]["messages"]) if case in kept else True
    batches = ranks[0]["stock"]["steps"] * (4 if "GRPO" in case else 6)
    for place in (0, -1):
        assert (ranks[place]["patched"]["calls"]["policy", "fused"] < batches) == (place in MERGED[case])


@pytest.mark.parametrize("case", ["ddp token budget uneven end"])
def test_the_last_step_has_the_pairs_that_accelerate_repeats(case, ranks, number_of_ranks):
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert (
            stock["steps"]
            == patched["steps"]
            == 2 * -(-13 // (WHOLE_STEPS["per_device_train_batch_size"] * number_of_ranks))
        )
        assert_same_gradients(stock["gradients"], patched["gradients"])
        assert_same_weights(stock, patched)
        of_ranks = [[{k: log[k] for k in log if k in OF_ALL_RANKS} for log in run["logs"]] for run in (stock, patched)]
        assert_same_logs(*of_ranks)


@pytest.mark.parametrize("case", ["ddp learned tokens", "fsdp2 learned tokens", "ddp learned tokens of rows"])
def test_ranks_agree_on_the_tokens_that_fit_on_the_last_one(case, ranks):
    """The device of the last rank has room for 108 tokens, those of the others for all."""
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert_same_gradients(stock["gradients"], patched["gradients"])
        assert_same_weights(stock, patched)
        assert patched["calls"] == ranks[0]["patched"]["calls"], "all ranks have the same number of micro-batches"
    (chosen,) = (x for x in ranks[0]["patched"]["messages"] if "repeats it" in x)
    assert 50 < int(chosen.split("max_tokens=")[-1].split()[0]) <= 108


OF_ALL_RANKS = {
    "loss",
    "grad_norm",
    "train_loss",
    "rewards/chosen",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
}
"""Stock leaves out some ranks from other metrics at the end of such an epoch."""
