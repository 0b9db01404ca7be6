"""What several trainer lines share where rotary embeddings depend on the width of a batch.

The KTO trainers of ms-swift and LLaMA-Factory ask `equal_when_merged` before one call replaces two, as TRL's does.
"""

import pytest
import torch

from fastdpo.integrations.scored_rows import equal_when_merged
from fastdpo.models import forward
from fastdpo.models.state import ForwardOptions
from tests.support.models.families import tiny_family

LIMITS = {"phi3-longrope": 16, "llama-dynamic": 15}
"""The largest width up to which the frequencies of each model are the same."""

each_model = pytest.mark.parametrize("name", LIMITS)


@each_model
def test_batches_are_merged_only_where_none_becomes_wider_than_the_limit(name):
    model, limit = tiny_family(name).eval(), LIMITS[name]
    forward.install(model, ForwardOptions("a trainer", "reference"), lambda scored, _: scored.logps.logps)

    def merges(a: int, b: int) -> bool:
        return equal_when_merged(model, torch.zeros(2, a, dtype=torch.long), torch.zeros(2, b, dtype=torch.long))

    assert merges(5, limit)
    assert merges(limit + 4, limit + 4)
    assert not merges(5, limit + 1)
    assert not merges(limit + 1, limit + 2)


def test_batches_of_other_models_are_merged_whatever_their_widths():
    model = tiny_family("llama").eval()
    forward.install(model, ForwardOptions("a trainer", "reference"), lambda scored, _: scored.logps.logps)
    assert equal_when_merged(model, torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 500, dtype=torch.long))
