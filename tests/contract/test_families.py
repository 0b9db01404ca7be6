"""Families of models in each trainer: fused, and equal to stock. Calls outside of the trainer are unchanged."""

import torch
import transformers

from fastdpo.models import attention
from fastdpo.models.examine import probe
from fastdpo.models.parts import text_config
from tests.contract.harness import cases
from tests.support.comparison import assert_fused

WIDTH = 12
"""Of rows of other calls: twice the window of families that have one."""


@cases("families")
def test_family(case, tmp_path):
    """The last model of DPO's patched training is what other calls are compared with."""
    models = []
    options = {"prepare": lambda model: models.append(model) or model, **case.value}
    runs = case.harness.both(tmp_path, max_steps=2, **options)
    assert_fused(runs[-1], **case.harness.fused(2))
    if case.harness.name == "trl.DPOTrainer" and transformers.__version__ >= "5":
        has_tower = "build" in case.value
        (assert_only_text_is_switched if has_tower else assert_other_calls_are_unchanged)(models[-1].eval())
        attention.switch(models[-1].to(torch.bfloat16))
        assert probe.probe(models[-1], torch.device("cpu")).unsupported_reason is None
    case.harness.assert_same(*runs)


def assert_other_calls_are_unchanged(model) -> None:
    """Padded forward passes and `generate()` give the same bits where packed attention is named, and afterwards."""
    ids = torch.randint(3, 90, (2, WIDTH), generator=torch.Generator().manual_seed(0))
    right = (torch.arange(WIDTH) < torch.tensor([[WIDTH], [WIDTH // 2 + 1]])).long()

    def outputs():
        with torch.no_grad():
            logits = [model(input_ids=ids, attention_mask=mask).logits for mask in (right, right.flip(1))]
        generation = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
        return *logits, model.generate(input_ids=ids, attention_mask=right.flip(1), **generation)

    implementation, before = model.config._attn_implementation, outputs()
    attention.switch(model)
    with attention.named(attention.configs_of(model)):
        assert model.config._attn_implementation != implementation
        named = outputs()
    assert model.config._attn_implementation == implementation
    for a, b, c in zip(before, named, outputs(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def assert_only_text_is_switched(model) -> None:
    parts = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    before = [part.config._attn_implementation for part in parts]
    attention.switch(model)
    with attention.named(attention.configs_of(model)):
        assert attention.implementation(model) != text_config(model)._attn_implementation
        for part, earlier in zip(parts, before, strict=True):
            assert (part.config is text_config(model)) == (part.config._attn_implementation != earlier)
    assert [part.config._attn_implementation for part in parts] == before
