"""Multimodal models in TRL's DPOTrainer on pairs with images."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

from fastdpo.models import images
from fastdpo.models.parts import language_model
from fastdpo.ops.attention.device_layout import rows_of
from tests.support.comparison import assert_trained_alike
from tests.support.models.multimodal import tiny_multimodal
from tests.support.recorded_calls import recorded_calls
from tests.support.trl.collators import Editing
from tests.support.trl.dpo import adapter, assert_fused, assert_same_bits
from tests.support.trl.vision import FAMILIES, train_vision_both

LORA_TARGETS = r".*(language_model|text_model)\..*\.(q_proj|v_proj)"  # PEFT does not know Gemma 4's tower
STOCK = {("policy", "stock"): 2, ("reference", "stock"): 2}


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_vision_both, tmp_path)


@pytest.fixture
def shared(monkeypatch):
    """Whether the images of each packed batch were run once."""
    return recorded_calls(monkeypatch, images, "pack", lambda packed, *args: packed.shares_images)


@dataclass
class Edited(Editing, DataCollatorForVisionPreference):
    """TRL's collator, with `edit` applied to its batches."""


def edited(name: str, edit: Callable) -> Edited:
    return Edited(FAMILIES[name].processor(), edit=edit)


def in_tower(name: str) -> bool:
    return any(part in name for part in ("vision", "visual"))


@pytest.mark.parametrize("name", FAMILIES)
def test_same_training(both, shared, name):
    stock, patched = both(name)
    assert any(in_tower(parameter) for parameter in stock.gradients[0])
    assert_trained_alike((stock, patched), policy=2, reference=2)
    assert shared == [True] * 4


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["stored", "reentrant", "recomputed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3_vl", "smolvlm"])
def test_same_training_with_gradient_checkpointing(both, name, lora, use_reentrant):
    options = adapter(target_modules=LORA_TARGETS) if lora else {}
    if use_reentrant is not None:
        options |= dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
    assert_trained_alike(both(name, evaluate=(1, 1, 2, 0), **options), policy=2, reference=3, eval=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_without_images(both, name):
    assert_trained_alike(both(name, images=(0, 0, 0, 0, 1, 0, 1, 2)), policy=2, reference=2)


ISLANDS = [name for name, family in FAMILIES.items() if family.islands]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ISLANDS)
def test_images_that_attend_in_both_directions(both, monkeypatch, name, implementation):
    """The masks of types of layers that have islands, and those that have none."""

    def have_islands(masks, *args):
        return {kind: rows_of(x, int(x[0, 0, -1, 2:].sum())).ahead is not None for kind, x in masks.items()}

    found = recorded_calls(monkeypatch, images, "attention_masks", have_islands)
    assert_trained_alike(both(name, prepare=lambda model: with_attention(model, implementation)), policy=2, reference=2)
    in_all = FAMILIES[name].islands == "all layers"
    assert found == [{"full_attention": in_all, "sliding_attention": True}] * 4


def with_attention(model, implementation):
    language_model(model).set_attn_implementation(implementation)
    return model


def _seen_by_the_next_token(mask):
    """Lets a token of text see the first token of the image after it."""
    mask[:, :, 1, 2] = True
    return mask


def test_other_masks_fall_back_to_stock(both, monkeypatch, caplog):
    kind = type(tiny_multimodal("gemma3"))
    make = kind.create_masks_for_generate

    def other_masks(*args, **options):
        return {name: _seen_by_the_next_token(mask) for name, mask in make(*args, **options).items()}

    monkeypatch.setattr(kind, "create_masks_for_generate", staticmethod(other_masks))
    assert_trained_alike(both("gemma3"), STOCK, same=assert_same_bits)
    assert caplog.text.count("a part of an image sees tokens that are not stored") == 2


def other_images(batch):
    """Changes one patch of one image of a rejected row."""
    pixels = batch["pixel_values"]
    place = len(pixels) // 2
    pixels[place] = pixels[place].flip(-1)


def other_prompts(batch):
    """Changes a token of all rejected rows that stands before their images."""
    half = len(batch["input_ids"]) // 2
    batch["input_ids"][half:, 0] = batch["input_ids"][half:, 0] % 50 + 7


@pytest.mark.parametrize("edit", [other_images, other_prompts])
@pytest.mark.parametrize("name", ["qwen3_vl", "smolvlm", "mistral3"])
def test_rows_of_a_pair_that_differ(both, shared, name, edit):
    assert_trained_alike(both(name, data_collator=edited(name, edit)), policy=2, reference=2)
    assert shared == [False] * 4


def ignored_row(batch):
    batch["completion_mask"][1] = 0


def ignored_pair(batch):
    batch["completion_mask"][[1, 5]] = 0


@pytest.mark.parametrize(("edit", "path"), [(ignored_row, "fused"), (ignored_pair, "stock")])
def test_rows_without_labels(both, caplog, edit, path):
    """Tokens that no label depends on are not stored; the features of their images would be left over."""
    assert_trained_alike(
        both("qwen3_vl", data_collator=edited("qwen3_vl", edit)), {("policy", path): 2, ("reference", path): 2}
    )
    assert ("a row with images has no labels" in caplog.text) == (path == "stock")


def test_truncated_completions(both):
    assert_trained_alike(both("qwen3_vl", images=(1,) * 8, max_length=16), policy=2, reference=2)


def test_dropout(both, shared):
    _, patched = both("smolvlm", disable_dropout=False, **adapter(lora_dropout=0.1))
    assert_fused(patched, policy=2, reference=2)
    assert shared == [True] * 4, "the reference is the policy without its adapter, in its mode"


def with_batch_norm(model):
    model.model.vision_tower.add_module("norm", torch.nn.BatchNorm2d(3))
    return model


def test_a_tower_with_batch_norm_falls_back_to_stock(both, caplog):
    assert_trained_alike(both("llava", prepare=with_batch_norm), STOCK, same=assert_same_bits)
    assert caplog.text.count("images are normalised over the batch (BatchNorm)") == 2


def _equal_images(monkeypatch):
    monkeypatch.setattr(images, "are_repeated", lambda call: True)


def _one_dimension(monkeypatch):
    monkeypatch.setattr(images, "positions_of", lambda model, layout, *call: layout.position_ids[None])


def _no_islands(monkeypatch):
    monkeypatch.setattr(images, "attention_masks", lambda model, layout, *args: layout.mask)


SABOTAGES = [
    ("qwen3_vl", _equal_images, other_images),
    ("smolvlm", _equal_images, other_images),
    ("qwen3_vl", _one_dimension, None),
    ("gemma3", _no_islands, None),
    ("gemma4", _no_islands, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "sabotage", "edit"), SABOTAGES)
def test_the_first_batch_shows_an_error(both, monkeypatch, caplog, name, sabotage, edit, dtype):
    sabotage(monkeypatch)
    collator = None if edit is None else edited(name, edit)
    _, patched = both(name, data_collator=collator, prepare=lambda model: model.to(dtype))
    assert patched.calls == STOCK
    assert "differ from its padded ones" in caplog.text
