"""TRL's GRPOTrainer, stock against patched: the same completions, loss, metrics and gradients."""

import functools

import pytest
import torch
from peft import LoraConfig

from tests.support.comparison import assert_same_in_low_precision
from tests.support.trl.dpo import LORA, assert_fused, trained_adapter
from tests.support.trl.groups import (
    AGAIN,
    CLIPPED,
    SCORED_BEFORE,
    GroupRun,
    assert_same_groups,
    train_both_groups,
    train_group,
)
from tests.support.trl.online import writer

ONCE = dict(policy=3)
WITHOUT_REFERENCE = {**SCORED_BEFORE, "reference": 0}
SPLIT = {"policy": 3, "old_policy": 4}
"""The 12 completions of two prompts are scored in batches of 3."""


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_groups, tmp_path)


def environment(asked, trainer):
    """Generates completions of the trainer, of which some tokens come from an environment."""
    ids, _, _ = trainer._tokenize_prompts(asked)
    completions, _ = trainer._generate_single_turn(ids, None, {}, trainer.num_generations)
    masks = [[int(i % 3 != 1) for i in range(len(completion))] for completion in completions]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}


NO_END = dict(generation_kwargs={"suppress_tokens": list(range(1, 21))})
OPTIONS = {
    "as it is": (dict(), ONCE),
    "reference": (dict(beta=0.1), dict(policy=3, reference=3)),
    "clipped": (CLIPPED, SCORED_BEFORE),
    "sequence ratios": (dict(**CLIPPED, importance_sampling_level="sequence", loss_type="grpo"), SCORED_BEFORE),
    "two-sided clipping": (dict(**AGAIN, delta=1.5), WITHOUT_REFERENCE),
    "off-policy mask": (dict(**AGAIN, off_policy_mask_threshold=0.05), WITHOUT_REFERENCE),
    "kl without correction": (dict(**CLIPPED, use_bias_correction_kl=False), SCORED_BEFORE),
    # entropy
    # Small steps: rounding must not decide which tokens have the highest entropies.
    "high entropy": (dict(**AGAIN | {"learning_rate": 0.1}, top_entropy_quantile=0.35), WITHOUT_REFERENCE),
    "entropy bonus": (dict(entropy_coef=0.3), ONCE),
    "adaptive entropy": (dict(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=10.0), ONCE),
    "temperature": (dict(**CLIPPED, temperature=0.7), SCORED_BEFORE),
    # completions
    "no end": (dict(beta=0.1, **NO_END), dict(policy=3, reference=3)),
    "one token": (dict(beta=0.1, max_completion_length=1), dict(policy=3, reference=3)),
    "truncated completions": (dict(**CLIPPED, mask_truncated_completions=True), SCORED_BEFORE),
    "only truncated completions": (dict(**CLIPPED, **NO_END, mask_truncated_completions=True), SCORED_BEFORE),
    "environment": (dict(**CLIPPED, rollout_func=environment), SCORED_BEFORE),
    "equal completions": (dict(beta=0.1, top_k=1), dict(policy=3, reference=3)),
    "padded to a multiple": (dict(pad_to_multiple_of=16), ONCE),
    # reference
    "adapter": (dict(**CLIPPED, reference=False, peft_config=LoraConfig(**LORA)), SCORED_BEFORE),
    "loaded adapter": (dict(**CLIPPED, reference=False, prepare=trained_adapter), SCORED_BEFORE),  # TRL copies it
    "reference follows": (dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1), dict(policy=3, reference=3)),
    # batches and memory
    "split groups": (dict(per_device_train_batch_size=3, num_generations=6, steps_per_generation=4), SPLIT),
    "accumulation": (dict(gradient_accumulation_steps=2, steps_per_generation=2, max_steps=2), dict(policy=4)),
    "evaluation": (dict(beta=0.1, evaluate=3), dict(policy=3, reference=3 + 3, eval=3)),
    "checkpointing": (dict(**CLIPPED, gradient_checkpointing=True), SCORED_BEFORE),
    "float32 head": (dict(beta=0.1, cast_lm_head_to_fp32=True), dict(policy=3, reference=3)),
    # between the head and the logits
    "softcap": (dict(kind="gemma2", tiny=dict(query_pre_attn_scalar=8, final_logit_softcapping=3.0)), ONCE),
    "scaled logits": (dict(kind="granite", tiny=dict(logits_scaling=4.0)), ONCE),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(both, option):
    options, calls = OPTIONS[option]
    stock, patched = both(**options)
    assert_same_groups(stock, patched)
    assert_fused(patched, **calls)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo"])
def test_loss_type(both, loss_type):
    stock, patched = both(**CLIPPED, loss_type=loss_type)
    assert_same_groups(stock, patched)
    assert_fused(patched, **SCORED_BEFORE)


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
    run = train_group(tmp_path, writer(), **{**OPTIONS[option][0], "beta": 0.0})
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
