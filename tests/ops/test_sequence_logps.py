"""sequence_logps and linear_sequence_logps next to sums of token_logps. `test_contract.py` has the rest."""

import pytest
import torch
import torch.nn.functional as F

from fastdpo.ops import linear_logps, linear_sequence_logps, sequence_logps, token_logps
from fastdpo.testing import error


def packed_inputs(lengths, dtype=torch.float32, v=37, d=16):
    """Hidden states, weight, bias, targets (some ignored) and the offsets of the sequences."""
    n = sum(lengths)
    targets = torch.randint(v, (n,))
    targets[2::5] = -100
    cu_seqlens = F.pad(torch.tensor(lengths, dtype=torch.long).cumsum(0), (1, 0))
    floats = (torch.randn(n, d), torch.randn(v, d), torch.randn(v))
    hidden, weight, bias = (x.to(dtype) for x in floats)
    return dict(hidden=hidden, weight=weight, bias=bias, targets=targets, cu_seqlens=cu_seqlens)


def test_equals_sums_of_token_logps():
    inputs = packed_inputs([5, 1, 17, 3])
    bounds = inputs.pop("cu_seqlens")
    tokens = linear_logps(**inputs).logps
    expected = torch.stack([part.double().sum() for part in tokens.split(bounds.diff().tolist())]).float()
    assert torch.equal(linear_sequence_logps(**inputs, cu_seqlens=bounds).logps, expected)
    logits = torch.randn(3, 7, 37)
    targets = torch.randint(37, (3, 7))
    expected = token_logps(logits, targets).logps.double().sum(1).float()
    assert torch.equal(sequence_logps(logits, targets).logps, expected)


def test_long_sums_are_taken_in_float64():
    logits, targets = torch.randn(1, 20000, 2), torch.zeros(1, 20000, dtype=torch.long)
    exact = token_logps(logits, targets).logps.double().sum(1)
    assert error(sequence_logps(logits, targets).logps, exact) <= torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize("budget", [0, 1 << 20])  # no tile kept, all tiles kept: the sum must not depend on it
def test_policy_and_reference_are_bitwise_equal(budget):
    inputs = packed_inputs([5, 1, 17, 3], torch.bfloat16)
    reference = linear_sequence_logps(**inputs)
    inputs |= {name: inputs[name].requires_grad_() for name in ("hidden", "weight", "bias")}
    assert torch.equal(linear_sequence_logps(**inputs, memory_budget=budget).logps, reference.logps)


def test_a_target_of_probability_zero_affects_only_its_sequence():
    logits = torch.zeros(2, 3, 4)
    logits[0, 1, 2] = -float("inf")
    assert sequence_logps(logits, torch.full((2, 3), 2)).logps.isinf().tolist() == [True, False]
