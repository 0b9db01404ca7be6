"""Hybrid and recurrent models in TRL's DPOTrainer. tests/contract/test_families.py trains all of them fully."""

import pytest
from peft import LoraConfig

from fastdpo.models.mixers.segments import Segments
from tests.support.comparison import assert_trained_alike
from tests.support.models.families import HYBRID, kind
from tests.support.trl.dpo import long_pairs

LONG = ((150, 20, 33), (130, 5, 40), (140, 30, 12), (135, 2, 25))
"""Tokens of prompts and completions whose states are shared, by any chunk."""

REFUSING_OUT_PROJ = ("mamba2", "falcon_h1", "granitemoehybrid", "nemotron_h", "mamba", "falcon_mamba")
"""Families in which PEFT adapts all linear layers but `out_proj`."""

MAMBA_TARGETS = ["in_proj", "x_proj", "q_proj", "v_proj"]

DISTINCT = ("qwen3_5_text", "kimi_linear", "falcon_h1", "zamba2", "lfm2", "jamba")
"""One family of each kind of mixer."""

CHECKPOINTING = {
    "reentrant": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
    "not reentrant": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
}


@pytest.fixture
def shared(monkeypatch) -> list[bool]:
    """Whether states were shared, for each call of a scan."""
    found, stock = [], Segments.sequences

    def sequences(self, *options):
        result = stock(self, *options)
        found.append(result.parents is not None)
        return result

    monkeypatch.setattr(Segments, "sequences", sequences)
    return found


@pytest.mark.parametrize("name", [x if x in DISTINCT else pytest.param(x, marks=pytest.mark.thorough) for x in HYBRID])
def test_adapters(both, name):
    targets = MAMBA_TARGETS if name in REFUSING_OUT_PROJ else "all-linear"
    lora = LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
    assert_trained_alike(
        both(kind(name), HYBRID[name][1], reference=False, peft_config=lora, max_steps=2), policy=2, reference=2
    )


@pytest.mark.parametrize("checkpointing", [*CHECKPOINTING, None])
@pytest.mark.parametrize("name", DISTINCT)
def test_long_prompts(both, shared, name, checkpointing):
    options = dict(data=long_pairs(LONG), max_steps=2, max_length=512, **CHECKPOINTING.get(checkpointing, {}))
    assert_trained_alike(both(kind(name), HYBRID[name][1], **options), policy=2, reference=2)
    assert any(shared) == (name not in ("lfm2", "jamba"))
