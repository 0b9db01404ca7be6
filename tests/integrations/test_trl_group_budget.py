"""`patch(max_tokens=...)` for GRPO and RLOO: the steps of stock, whose rows are cut anew by a budget of tokens."""

import functools

import pytest
import torch
from peft import LoraConfig

import fastdpo
from fastdpo.integrations.trl import groups
from fastdpo.models import calls as counters
from tests.integrations.test_trl_budget import act_within_a_step
from tests.support.trl.dpo import LORA
from tests.support.trl.groups import build_group
from tests.support.trl.online import writer
from tests.support.workers.budgets import GRPO, MAX_TOKENS, RLOO, compared, trained
from tests.support.workers.group_budgets import STEPS


@pytest.fixture
def compare(tmp_path):
    return functools.partial(compared, tmp_path)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo", "sapo", "dapo", "cispo", "vespo"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_loss_type(compare, loss_type, accumulation):
    size = 16 // accumulation
    patched = compare(
        GRPO, loss_type=loss_type, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation
    )
    assert {path for _, path in patched.calls} == {"fused"}
    # Some step has three micro-batches: 16 rows are not cut into three equal parts.
    assert 2 * STEPS["max_steps"] < patched.calls["policy", "fused"] < 4 * STEPS["max_steps"]


AGAIN = dict(steps_per_generation=8, num_iterations=2, max_steps=4)
"""Each generation is two steps, on which the policy is trained twice: ratios differ from 1, and some are clipped."""
SPLIT = dict(per_device_train_batch_size=3, num_generations=6)
"""The batches of stock hold parts of groups."""
OPTIONS = {
    "trained on again": (GRPO, AGAIN),
    "sequence ratios": (GRPO, dict(**AGAIN, importance_sampling_level="sequence", loss_type="luspo")),
    "off-policy mask": (GRPO, dict(**AGAIN, off_policy_mask_threshold=0.05, delta=1.5, loss_type="grpo")),
    "batches twice in a step": (GRPO, dict(steps_per_generation=2, num_iterations=2)),
    "generations within a step": (GRPO, dict(steps_per_generation=1, loss_type="grpo")),
    "tokens of generations within a step": (GRPO, dict(steps_per_generation=2)),
    "generations across steps": (GRPO, dict(steps_per_generation=6)),
    "split groups": (GRPO, SPLIT),
    "one micro-batch": (GRPO, dict(max_tokens=10_000)),
    "truncated completions": (GRPO, dict(mask_truncated_completions=True)),
    "adapter": (GRPO, dict(**AGAIN, peft_config=LoraConfig(**LORA))),
    "checkpointing": (GRPO, dict(gradient_checkpointing=True)),
    "logged later": (GRPO, dict(logging_steps=2)),
    "evaluation": (GRPO, dict(evaluate=4, eval_strategy="steps", eval_steps=1)),
    "rows above the budget": (GRPO, dict(max_tokens=12)),
    "RLOO": (RLOO, {}),
    "RLOO without accumulation": (RLOO, dict(per_device_train_batch_size=16, gradient_accumulation_steps=1)),
    "RLOO, trained on again": (RLOO, AGAIN),
    "RLOO, generations across steps": (RLOO, dict(steps_per_generation=6)),
    "RLOO, split groups": (RLOO, SPLIT),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(compare, option):
    trainer, options = OPTIONS[option]
    patched = compare(trainer, **options)
    assert {path for _, path in patched.calls} == {"fused"}
    if "num_iterations" in options and "max_steps" in options:
        assert any(log.get("clip_ratio/region_mean", 0) > 0 for log in patched.logs)


def test_micro_batches_fill_the_budget_and_compute_prompts_once(tmp_path, computed):
    """Each of the two micro-batches holds all completions of its prompts."""
    sizes = dict(beta=0.0, max_steps=1, num_generations=8, per_device_train_batch_size=8)
    policy_tokens = {}
    for max_tokens in (None, 160, 10**6):
        computed.clear()
        with fastdpo.patched(GRPO, max_tokens=max_tokens):
            patched = trained(tmp_path / str(max_tokens), GRPO, **sizes)
        assert {path for _, path in patched.calls} == {"fused"}
        policy_tokens[max_tokens] = list(computed)
    assert len(policy_tokens[None]) == 4
    assert max(policy_tokens[160]) <= 160
    assert sum(policy_tokens[160]) < 0.8 * sum(policy_tokens[None])
    assert sum(policy_tokens[160]) <= 1.02 * sum(policy_tokens[10**6])


def test_a_training_after_one_that_was_stopped_within_a_step(tmp_path):
    """The first one is stopped after two of the four batches of its second step."""
    fastdpo.patch(GRPO, max_tokens=MAX_TOKENS[GRPO])
    options = {**STEPS, "steps_per_generation": 4, "beta": 0.0}
    trainer = build_group(tmp_path, writer(), **options)
    act_within_a_step(trainer, lambda trainer, control: setattr(control, "should_training_stop", True), 5)
    trainer.train()
    assert trainer.state.global_step == 1
    steps = counters.outcomes[GRPO, "steps"]
    trainer._step, trainer._buffered_inputs = 0, None
    trainer.train()
    assert trainer.state.global_step == STEPS["max_steps"]
    assert counters.outcomes[GRPO, "steps"] == steps + STEPS["max_steps"]


def test_a_router_loss_is_refused(tmp_path):
    fastdpo.patch(GRPO, max_tokens=MAX_TOKENS[GRPO])
    model = writer(0, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(NotImplementedError, match="does not support the auxiliary loss of routers"):
        build_group(tmp_path, model, beta=0.0, router_aux_loss_coef=0.1)


def test_batches_with_images_are_refused():
    with pytest.raises(NotImplementedError, match="does not support batches with pixel_values, such as"):
        groups.joined_entry("pixel_values", [torch.zeros(2, 3), torch.zeros(2, 3)])
    with pytest.raises(NotImplementedError, match="does not support batches with num_images, such as"):
        groups.joined_entry("num_images", [[1, 1], [1, 1]])
