"""Image towers that policy and reference have in common, in TRL's DPOTrainer."""

import functools

import pytest
import torch

from fastdpo.integrations.patching import options_of
from fastdpo.models import towers
from fastdpo.models.examine import probe
from tests.support.comparison import assert_far_from_same, assert_trained_alike
from tests.support.models.multimodal import tiny_multimodal
from tests.support.trl.dpo import adapter, assert_same
from tests.support.trl.vision import train_vision_both

OF_TEXT = r".*(language_model|text_model)\..*\.(q_proj|v_proj)"
"""LoRA on the language model only."""


@pytest.fixture
def both(tmp_path, monkeypatch):
    """`train_vision_both`, and how often the patched training runs a tower.

    The comparison of the first batch is left out, since it runs towers as well.
    """
    monkeypatch.setattr(probe, "compare", lambda *args, **options: probe.ProbeResult(None))

    def run(name, **options):
        seen = []
        for tower in towers.towers_of(tiny_multimodal(name)):
            own = type(tower).forward

            @functools.wraps(own)
            def forward(self, *args, own=own, **kwargs):
                seen.append(is_patched())
                return own(self, *args, **kwargs)

            monkeypatch.setattr(type(tower), "forward", forward)
        runs = train_vision_both(tmp_path, name, **options)
        return *runs, sum(seen)

    return run


def is_patched() -> bool:
    return options_of("trl.DPOTrainer") is not None


def equal_towers(model, trained: bool = False):
    """Gives the towers the same weights in each model."""
    torch.manual_seed(7)
    for tower in towers.towers_of(model):
        for p in tower.parameters():
            torch.nn.init.normal_(p, std=0.3)
        tower.requires_grad_(trained)
    return model


def frozen(model):
    for tower in towers.towers_of(model):
        tower.requires_grad_(False)
    return model


NAMES = ["qwen3_vl", "smolvlm", "mistral3", "llava", "gemma3", "gemma4"]


@pytest.mark.parametrize("name", NAMES)
def test_without_an_adapter_a_tower_runs_once_for_both(both, name):
    stock, patched, calls = both(name, evaluate=(1, 1, 2, 0), **adapter(target_modules=OF_TEXT))
    assert_trained_alike((stock, patched), policy=2, reference=3, eval=1)
    assert calls == 3
    assert not towers.encoded


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "recomputed"])
def test_with_gradient_checkpointing(both, use_reentrant):
    options = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
    stock, patched, calls = both("qwen3_vl", **options, **adapter(target_modules=OF_TEXT))
    assert_same(stock, patched)
    assert calls == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_tower_that_equals_the_references_runs_once(both, name):
    stock, patched, calls = both(name, prepare=equal_towers, gradient_accumulation_steps=2, max_steps=1)
    assert_trained_alike((stock, patched), policy=2, reference=2)
    assert calls == 2


DIFFERENT = {
    "other weights": dict(prepare=frozen),
    "a trained tower": dict(prepare=functools.partial(equal_towers, trained=True)),
    "an adapter in the tower": adapter(target_modules=r".*\.(qkv|q_proj)"),
}


@pytest.mark.parametrize("options", DIFFERENT.values(), ids=DIFFERENT)
def test_towers_that_differ_run_for_each_model(both, options):
    stock, patched, calls = both("qwen3_vl", **options)
    assert_same(stock, patched)
    assert calls == 4


def with_images_written_to(model):
    """Each call of the model halves its images, by a write that raises no version."""

    def halve(module, args, kwargs):
        kwargs["pixel_values"].data.mul_(0.5)

    equal_towers(model).register_forward_pre_hook(halve, with_kwargs=True)
    return model


def test_images_that_are_written_to_are_encoded_again(both):
    stock, patched, calls = both("qwen3_vl", prepare=with_images_written_to)
    assert_trained_alike((stock, patched), policy=2, reference=2)
    assert calls == 4


def with_hook(model):
    towers.towers_of(model)[0].register_forward_hook(lambda *args: None)
    return model


def with_dropout(model):
    towers.towers_of(model)[0].config.attention_dropout = 0.5
    return model


@pytest.mark.parametrize("prepare", [with_hook, with_dropout])
def test_towers_with_hooks_or_dropout_run_for_each_model(both, prepare):
    *_, calls = both("smolvlm", prepare=prepare, **adapter(target_modules=OF_TEXT))
    assert calls == 4


def test_nothing_is_kept_of_a_batch_that_is_gone(both):
    """The second model's own towers are not kept, and a batch takes with it what was kept for it."""
    model = tiny_multimodal("llava")
    batch = torch.randn(2, 3, 16, 16)
    with torch.no_grad(), towers.sharing(model, {"pixel_values": batch}):
        features = model.model.vision_tower(batch).last_hidden_state
    assert len(towers.encoded) == 1
    with torch.no_grad(), towers.sharing(model, {"pixel_values": batch}):
        again = model.model.vision_tower(batch.clone()).last_hidden_state
    assert again.data_ptr() == features.data_ptr()
    assert not towers.encoded[batch]
    del batch
    assert not towers.encoded


@pytest.mark.parametrize("change", ["weights", "images", "output", "autocast"])
def test_a_change_between_both_calls_is_noticed(change):
    model = tiny_multimodal("llava")
    tower = model.model.vision_tower
    batch = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        with towers.sharing(model, {"pixel_values": batch}):
            output = tower(batch).last_hidden_state
        if change == "weights":
            next(iter(tower.parameters())).mul_(2)
        elif change == "images":
            batch[0, 0, 0, 0] += 1
        elif change == "output":
            output.zero_()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"),
            towers.sharing(model, {"pixel_values": batch}),
        ):
            again = tower(batch).last_hidden_state
            expected = tower(batch).last_hidden_state
    assert torch.equal(again, expected)
    assert again.data_ptr() != output.data_ptr()


def test_the_comparison_detects_images_of_another_batch(both, monkeypatch):
    first = []

    def reusing(tower, earlier, kept):
        own = tower.forward

        def forward(*args, **kwargs):
            if not first:
                first.append(own(*args, **kwargs))
            return first[0]

        return forward

    monkeypatch.setattr(towers, "reusing", reusing)
    stock, sabotaged, calls = both("smolvlm", images=(1,) * 8, **adapter(target_modules=OF_TEXT))
    assert calls == 1
    assert_far_from_same(stock, sabotaged, stock.in_float64)
