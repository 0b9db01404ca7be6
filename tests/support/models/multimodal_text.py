"""Tiny random multimodal models that programs train on text, for any transformers 5."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.support.comparison import drawn, sizes_of

TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
TOWER |= dict(patch_size=4, image_size=16)
WINDOWS = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
THREE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))
QWEN = dict(hidden_size=16, intermediate_size=24, depth=1, num_heads=2, patch_size=4, out_hidden_size=32)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (WINDOWS, TOWER, dict(mm_tokens_per_image=4)),
    "qwen3_vl": (THREE, dict(QWEN, deepstack_visual_indexes=[0], num_position_embeddings=64), {}),
}
"""Maps a model type to the configurations of its text, of its images and the rest."""


def multimodal_model(kind: str, words: int, seed: int = 0) -> PreTrainedModel:
    """A model whose vocabulary has the placeholder of images behind the words of the text."""
    text, vision, rest = KINDS[kind]
    parts = dict(text_config=sizes_of(words + 1) | text, vision_config=vision, **rest)
    return drawn(AutoModelForImageTextToText, kind, seed, **parts, image_token_id=words)
