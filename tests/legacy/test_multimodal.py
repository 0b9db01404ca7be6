"""Multimodal models with transformers 4. TRL 0.24 to 0.28 trains none of them on text."""

import functools

import pytest
import torch
from transformers import AutoModelForImageTextToText

from fastdpo.models import attention
from fastdpo.models.examine import probe, support
from tests.support.comparison import drawn, sizes_of
from tests.support.models.multimodal_text import QWEN, TOWER
from tests.support.trl.dpo import WORDS, assert_same_error

THREE = dict(rope_scaling=dict(rope_type="default", type="mrope", mrope_section=[1, 1, 2]))
KINDS = {
    "gemma3": (dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"]), TOWER),
    "llava": (dict(model_type="llama"), dict(TOWER, model_type="clip_vision_model")),
    "smolvlm": (dict(model_type="llama"), TOWER),
    "qwen2_5_vl": (THREE, QWEN),
}


def multimodal(kind: str, seed: int = 0) -> torch.nn.Module:
    text, vision = KINDS[kind]
    parts = dict(text_config=sizes_of(len(WORDS)) | text, vision_config=vision, image_token_id=len(WORDS) - 1)
    return drawn(AutoModelForImageTextToText, kind, seed, **parts)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_text_equals_padded_text(kind):
    model = multimodal(kind)
    assert support.unsupported_reason(model) is None
    attention.switch(model)
    assert probe.probe(model, torch.device("cpu")).unsupported_reason is None


def test_text_fails_in_stock_with_the_same_error(tmp_path):
    """TRL takes a processor for these models, and images from each row."""
    assert_same_error(tmp_path, functools.partial(multimodal, "llava"), AttributeError)
