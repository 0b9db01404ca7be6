"""OpenRLHF's DPOTrainer on multimodal models, which it trains on text."""

from pathlib import Path

import pytest
from openrlhf_runs import VOCABULARY, Strategy, assert_same, train

import fastdpo
from tests.support.comparison import double
from tests.support.models.multimodal_text import KINDS, multimodal_model


def checkpoint(directory: Path, kind: str, seed: int) -> Path:
    path = directory / f"{kind}{seed}"
    multimodal_model(kind, VOCABULARY, seed).save_pretrained(path)
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
