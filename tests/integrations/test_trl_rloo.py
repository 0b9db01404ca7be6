"""TRL's RLOOTrainer, stock against patched: the same completions, loss, metrics and gradients."""

import pytest
from peft import LoraConfig
from trl import RLOOTrainer

from tests.support.trl.dpo import LORA, assert_fused
from tests.support.trl.groups import AGAIN, CLIPPED, SCORED_BEFORE, assert_same_groups, train_both_groups

ONCE = {"policy": 3, "old_policy": 3, "reference": 3}
TWICE = {"policy": 4, "old_policy": 4, "reference": 4}
"""Two steps of two batches."""
SPLIT = {"policy": 3, "old_policy": 4, "reference": 4}
"""The 12 completions of two prompts are scored in batches of 3."""
NO_END = dict(generation_kwargs={"suppress_tokens": list(range(1, 21))})


OPTIONS = {
    "as it is": (dict(), ONCE),
    "without a reference": (dict(beta=0.0), {"policy": 3, "old_policy": 3}),
    "clipped": (CLIPPED, SCORED_BEFORE),
    "normalized": (dict(normalize_advantages=True, reward_clip_range=(0.2, 0.7)), ONCE),
    "temperature": (dict(temperature=0.7), ONCE),
    "one token": (dict(max_completion_length=1), ONCE),
    "truncated completions": (dict(mask_truncated_completions=True), ONCE),
    "only truncated completions": (dict(**NO_END, mask_truncated_completions=True), ONCE),
    "adapter": (dict(**AGAIN, reference=False, peft_config=LoraConfig(**LORA)), SCORED_BEFORE),
    "accumulation": (dict(gradient_accumulation_steps=2, steps_per_generation=2, max_steps=2), TWICE),
    "split groups": (dict(per_device_train_batch_size=3, num_generations=6, steps_per_generation=4), SPLIT),
    "evaluation": (dict(evaluate=3), {"policy": 3, "old_policy": 3, "reference": 3 + 3, "eval": 2 * 3}),
    "checkpointing": (dict(gradient_checkpointing=True), ONCE),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(tmp_path, option):
    options, calls = OPTIONS[option]
    stock, patched = train_both_groups(tmp_path, RLOOTrainer, **options)
    assert_same_groups(stock, patched)
    assert_fused(patched, **calls)
