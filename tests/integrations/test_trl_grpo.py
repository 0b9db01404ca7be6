"""What is compared of TRL's GRPOTrainer: ratios that are clipped, completions of several lengths, a float32 head."""

import functools

import pytest
import torch

from tests.contract.trainers.trl.groups import OPTIONS_OF_GRPO
from tests.support.comparison import assert_same_in_low_precision
from tests.support.trl.dpo import assert_fused
from tests.support.trl.groups import (
    CLIPPED,
    GroupRun,
    train_both_groups,
    train_group,
)
from tests.support.trl.online import writer


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


def completion_lengths(run: GroupRun) -> set[int]:
    return {len(completion) for _, completions in run.generated for completion in completions}


@pytest.mark.parametrize(
    ("option", "lengths"),
    [("as it is", set(range(1, 9))), ("no end", {8}), ("one token", {1}), ("equal completions", set(range(1, 9)))],
)
def test_the_completions_of_an_option_have_these_lengths(tmp_path, option, lengths):
    run = train_group(tmp_path, writer(), **{**OPTIONS_OF_GRPO[option][0], "beta": 0.0})
    assert completion_lengths(run) <= lengths
    groups = [completions[i : i + 4] for _, completions in run.generated for i in range(0, len(completions), 4)]
    assert all(len(set(map(tuple, group))) == 1 for group in groups) == (option == "equal completions")


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
