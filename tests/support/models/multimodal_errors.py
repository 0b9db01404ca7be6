"""Multimodal models on packed tokens in float64, compared with padded rows."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

from fastdpo import packing
from fastdpo.models import attention, images
from fastdpo.models.batch import Call
from fastdpo.packing import Form
from tests.support.models.mixer_errors import in_dtype, largest_error, pairs, results_of
from tests.support.models.multimodal import tiny_multimodal
from tests.support.trl.vision import FAMILIES, PLAIN, vision_pairs

IMAGES = (1, 2, 0, 1)
"""Number of images of each pair."""


def errors_on_text(model: PreTrainedModel) -> list[float]:
    """The largest errors with shared prompts, and without."""
    exact, errors = None, []
    for share in (True, False):
        ids, mask, layout = pairs(share)
        ids = ids % (PLAIN - 5) + 5  # no placeholder of an image
        if exact is None:
            padded = dict(input_ids=ids, attention_mask=mask, use_cache=False)
            exact = results_of(model, padded, layout, packed=False)
        packed = attention.inputs_of(layout, ids)
        errors.append(largest_error(results_of(model, packed, layout, packed=True), exact))
    return errors


def errors_on_images(model: PreTrainedModel, name: str) -> list[float]:
    """The largest errors with shared prompts and images, and without."""
    batch = batch_with_images(name)
    call, exact, errors = Call.of(batch), None, []
    for share in (True, False):
        with patch.object(images, "are_repeated", lambda call, share=share: share):
            packed = images.pack(model, call, lambda groups: call.batch.pack(Form(groups)))
        assert packed.shares_images == share
        if exact is None:
            exact = results_of(model, call.padded_inputs, packed.layout, packed=False)
        errors.append(largest_error(results_of(model, packed.inputs, packed.layout, packed=True), exact))
    return errors


def batch_with_images(name: str) -> dict[str, Tensor]:
    """Arguments of a model call, as TRL's collator makes them."""
    batch = DataCollatorForVisionPreference(FAMILIES[name].processor())(vision_pairs(name, IMAGES))
    labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, packing.IGNORE_INDEX)
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()} | dict(labels=labels)


def switched(name: str) -> PreTrainedModel:
    """A model in float64 that is switched to packed attention."""
    model = in_dtype(tiny_multimodal(name), torch.float64)
    attention.switch(model)
    return model


def errors_of(name: str) -> list[float]:
    """The errors on text, and those on images if the tests train the family on any."""
    model = switched(name)
    return errors_on_text(model) + (errors_on_images(model, name) if name in FAMILIES else [])
