"""Sums and losses of sequences: precise, apart from each other, and of a layout. `test_contract.py` has the rest."""

import re

import pytest
import torch

from fastdpo import ops
from fastdpo.accuracy import error
from fastdpo.ops import sequence_logps, token_logps


def test_long_sums_are_taken_in_float64():
    logits, targets = torch.randn(1, 20000, 2), torch.zeros(1, 20000, dtype=torch.long)
    exact = token_logps(logits, targets).logps.double().sum(1)
    assert error(sequence_logps(logits, targets).logps, exact) <= torch.finfo(torch.float32).eps / 2


def test_a_target_of_probability_zero_affects_only_its_sequence():
    logits = torch.zeros(2, 3, 4)
    logits[0, 1, 2] = -float("inf")
    assert sequence_logps(logits, torch.full((2, 3), 2)).logps.isinf().tolist() == [True, False]


@pytest.mark.parametrize("bounds", [[0, 400_000, 3], [0, 2, 9], [1, 3, 4]])
def test_bounds_beyond_the_tokens_raise_in_compiled_calls(bounds):
    """They would be read from other memory."""
    compiled = torch.compile(sequence_logps, fullgraph=True, backend="eager")
    rule = re.escape(f"sequence_logps: cu_seqlens must increase from 0 to 3; got {bounds}")
    with torch.device("cpu"), pytest.raises(ValueError, match=rule):
        compiled(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long), torch.tensor(bounds))


def test_losses_that_compare_pairs_and_losses_without_a_reference():
    head = dict(hidden=torch.randn(8, 4), weight=torch.randn(9, 4), targets=torch.arange(8))
    references = dict(ref_chosen_logps=-torch.rand(2), ref_rejected_logps=-torch.rand(2))
    for loss, given in (("aot", references), ("simpo", {})):
        objective = ops.PreferenceObjective(loss)
        result = ops.linear_preference_loss(**head, **given, cu_seqlens=torch.arange(0, 9, 2), objective=objective)
        assert result.loss.isfinite()


def test_the_loss_of_a_layout():
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 4, 0, 0], [5, 6, 7, 10, 0], [5, 6, 3, 2, 1]])
    layout = ops.pack_pairs(ids, ids != 0, ids.masked_fill((ids == 0) | (ids == 5), -100))
    hidden, weight, refs = torch.randn(len(layout.token_index), 24), torch.randn(131, 24), torch.randn(2, 2)
    scored = hidden[layout.label_index]
    mine = ops.linear_preference_loss(scored, weight, layout.labels, layout.label_bounds, *refs)
    logps = ops.linear_logps(hidden[layout.score_index], weight, layout.targets).logps
    expected = ops.preference_loss(*layout.unpack(logps).double().sum(1).float().chunk(2), *refs)
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
