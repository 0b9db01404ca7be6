"""OpenRLHF's DPOTrainer on multimodal models, which it trains on text."""

from pathlib import Path

import pytest
import torch
from comparison import SIZES, double, sharpen
from openrlhf_runs import VOCABULARY, Strategy, assert_same, train
from transformers import AutoConfig, AutoModelForImageTextToText

import fastdpo

TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
TOWER |= dict(patch_size=4, image_size=16)
WINDOWS = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
THREE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))
QWEN = dict(hidden_size=16, intermediate_size=24, depth=1, num_heads=2, patch_size=4, out_hidden_size=32)
KINDS = {
    "gemma3": (WINDOWS, TOWER, dict(mm_tokens_per_image=4)),
    "qwen3_vl": (THREE, dict(QWEN, deepstack_visual_indexes=[0], num_position_embeddings=64), {}),
}
"""Maps a model type to the configurations of its text, of its images and the rest."""


def checkpoint(directory: Path, kind: str, seed: int) -> Path:
    text, vision, rest = KINDS[kind]
    parts = dict(text_config={**SIZES, "vocab_size": VOCABULARY, "head_dim": 8, **text}, vision_config=vision, **rest)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **parts, image_token_id=VOCABULARY - 1))
    sharpen(model)
    path = directory / f"{kind}{seed}"
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_packed(tmp_path, kind, lora):
    paths = [checkpoint(tmp_path, kind, seed) for seed in range(2)]
    options = dict(lora_rank=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]) if lora else {}
    stock = train(*paths, Strategy(), **options)
    stock.in_float64 = lambda: train(*paths, Strategy(), cast=double, **options)
    with fastdpo.patched("openrlhf"):
        patched = train(*paths, Strategy(), **options)
    assert_same(stock, patched)
    assert patched.calls == {("policy", "fused"): 3, ("reference", "fused"): 3}
