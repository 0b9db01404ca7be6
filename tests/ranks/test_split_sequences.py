"""Context and sequence parallelism, of which TRL's DPOTrainer supports neither: its first step raises.

Patched, ranks share batches by `cp_size`, and train as TRL does in one process. When TRL begins to support one of them,
a test fails here. Then docs/distributed.md needs another look.
"""

import re

import pytest
import torch
from rank_comparison import assert_same
from rank_launch import Launched

ERRORS = {
    "context parallel compiled": r"NotFused: .*compile=True, calls run whole batches \[sequence-option\]",
    "context parallel token budget": "NotCut: patch: max_tokens does not support parallelism_config",
    "context parallel stock": r"RuntimeError: The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
    **{
        f"sequence parallel {kind}": "ValueError: Ulysses SP requires `position_ids` in every dataloader batch"
        for kind in ("stock", "patched")
    },
}


@pytest.mark.parametrize("case", ERRORS)
def test_the_first_step_is_not_run(case, trained):
    launched = trained[case]
    assert isinstance(launched, Launched), "it trains"
    assert not launched.timed_out
    for output in launched.outputs:
        assert re.search(ERRORS[case], output), launched


TRAININGS = ["with checkpoints", "lora", "precomputed", "of uneven ends", "in two groups"]


@pytest.mark.parametrize(
    "cases", [[f"context parallel {what}{end}" for end in ("", " in one process")] for what in TRAININGS], ids=TRAININGS
)
def test_ranks_that_share_batches_train_as_one_process(cases, ranks_of):
    of_ranks, (alone,) = map(ranks_of, cases)
    for rank in of_ranks:
        run = rank["patched"]
        assert_same(alone["stock"], run)
        assert run["sharded"] > 0.5
        assert {path for _, path in run["calls"]} == {"fused"}
        assert run["logs"] == of_ranks[0]["patched"]["logs"]


EXACT = 4e-15
"""The largest difference of a gradient, in relation to the largest entry of its tensor."""


@pytest.mark.parametrize("cases", [["context parallel in float64", "context parallel in float64 in one process"]])
def test_in_float64_they_differ_by_rounding_alone(cases, ranks_of):
    of_ranks, (alone,) = map(ranks_of, cases)
    for rank in of_ranks:
        for expected, found in zip(alone["patched"]["gradients"], rank["patched"]["gradients"], strict=True):
            for name, x in expected.items():
                assert x.dtype == torch.float64
                assert (found[name] - x).abs().max() <= EXACT * x.abs().max()
