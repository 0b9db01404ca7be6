"""Context and sequence parallelism, which TRL's DPOTrainer does not support: its first step raises.

When TRL begins to support one of them, a test fails here. Then the reason `split-sequences` and
docs/distributed.md need another look.
"""

import re

import pytest
from rank_launch import Launched

ERRORS = {
    "context parallel": r"RuntimeError: The size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
    "sequence parallel": "ValueError: Ulysses SP requires `position_ids` in every dataloader batch",
}
KINDS = ("stock", "patched")


@pytest.mark.parametrize(
    ("cases", "error"),
    [([f"{parallelism} {kind}" for kind in KINDS], error) for parallelism, error in ERRORS.items()],
    ids=ERRORS,
)
def test_trl_raises_with_and_without_the_patch(cases, error, trained):
    for case in cases:
        launched = trained[case]
        assert isinstance(launched, Launched), "TRL trains with it"
        assert not launched.timed_out
        for output in launched.outputs:
            assert re.search(error, output), launched
