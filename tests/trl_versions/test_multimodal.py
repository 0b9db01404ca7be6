"""Multimodal models in the DPOTrainer of TRL 0.29 to 1.14, on pairs of text."""

import pytest

from tests.support.comparison import assert_trained_alike
from tests.support.models.multimodal import tiny_multimodal
from tests.support.trl.dpo import adapter

OF_TEXT = r".*language_model\..*\.(q_proj|v_proj)"


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_text_is_packed(both, name, lora):
    assert_trained_alike(
        both(name, build=tiny_multimodal, **(adapter(target_modules=OF_TEXT) if lora else {})), policy=3, reference=3
    )
