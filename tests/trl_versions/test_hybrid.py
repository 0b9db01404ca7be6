"""Hybrid models in the DPOTrainer of TRL 0.29 to 1.14."""

import pytest

from tests.support.comparison import assert_trained_alike
from tests.support.models.families import HYBRID, kind
from tests.support.trl.dpo import adapter


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_mixers_run_on_packed_tokens(both, name, lora):
    assert_trained_alike(
        both(kind(name), HYBRID[name][1], max_steps=2, **(adapter() if lora else {})), policy=2, reference=2
    )
