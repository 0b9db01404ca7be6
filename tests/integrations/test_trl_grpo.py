"""What is compared of TRL's GRPOTrainer: ratios that are clipped, completions of several lengths, a float32 head."""

import functools

import pytest
import torch

from tests.support.comparison import assert_same_in_low_precision
from tests.support.trl.dpo import assert_fused
from tests.support.trl.groups import CLIPPED, train_both_groups


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_groups, tmp_path)


def test_the_trainings_that_are_compared_are_clipped_on_either_side(both):
    """Otherwise they would not show that the same ratios are clipped."""
    stock, _ = both(**CLIPPED)
    clipped = torch.cat(stock.clipped)
    assert len(stock.clipped) == 4
    for direction in (-1, 0, 1):
        assert (clipped == direction).sum() >= 5


@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_head_next_to_weights_in_bfloat16(both, tied):
    """The head generates and scores in float32.

    There is one step, because its rounding may change completions of later steps.
    """

    def bfloat16(model):
        kept.append(model.bfloat16())
        return model

    kept: list = []
    options = dict(beta=0.1, cast_lm_head_to_fp32=True, max_steps=1)
    stock, patched = both(**options, tiny=dict(tie_word_embeddings=tied), prepare=bfloat16)
    assert stock.generated == patched.generated
    assert_fused(patched, policy=1, reference=1)
    assert_same_in_low_precision(stock, patched, torch.bfloat16, stock.in_float64)
    heads = [model.lm_head for model in kept]
    assert [head.weight.dtype for head in heads] == [torch.float32] * 2
    assert [head.forward.__name__ for head in heads] == ["cast_forward_to_fp32"] * 2
