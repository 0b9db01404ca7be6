"""Which arguments of a call belong to images, and which images a pair shares."""

import pytest
import torch

from benchmarks.float64 import float64_throughout
from fastdpo import packing
from fastdpo.models import attention, images
from fastdpo.models.batch import Call
from fastdpo.models.state import RunnableBatch
from fastdpo.packing import Form, NotPackable
from tests.support.models.multimodal import IMAGE, tiny_multimodal
from tests.support.models.multimodal_errors import errors_of
from tests.support.trl.dpo import tiny_model

IDS = torch.tensor([[5, IMAGE, 6, 7, 8], [5, 9, 6, 7, 0], [5, IMAGE, 6, 9, 0], [5, 9, 6, 8, 0]])
MASK = (IDS != 0).long()
LABELS = IDS.masked_fill((IDS == 0) | (torch.arange(5) < 3), packing.IGNORE_INDEX)


def call(pixels: torch.Tensor, ids: torch.Tensor = IDS, **others) -> Call:
    return Call.of(dict(input_ids=ids, attention_mask=MASK, labels=LABELS, pixel_values=pixels, **others))


def pack(model, given: Call) -> RunnableBatch:
    return images.pack(model, given, lambda groups: given.batch.pack(Form(groups)))


@pytest.fixture
def model():
    model = tiny_multimodal("llava")
    attention.switch(model)
    return model


def test_equal_images_are_run_once(model):
    pixels = torch.randn(1, 3, 16, 16).repeat(2, 1, 1, 1)
    packed = pack(model, call(pixels))
    assert packed.shares_images
    assert torch.equal(packed.inputs["pixel_values"], pixels[:1])
    assert packed.inputs["input_ids"].tolist() == [[5, IMAGE, 6, 7, 5, 9, 6]]


def test_a_write_to_an_image_is_noticed(model):
    pixels = torch.randn(1, 3, 16, 16).repeat(2, 1, 1, 1)
    assert pack(model, call(pixels)).shares_images
    pixels[0, 0, 0, 0] += 1
    assert not pack(model, call(pixels)).shares_images
    pixels[0] = pixels[1]
    assert pack(model, call(pixels)).shares_images


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids[2].__setitem__(0, 8),  # a token before the image
        lambda ids: ids[2].__setitem__(slice(0, 2), torch.tensor([IMAGE, 5])),  # the image in another place
        lambda ids: ids[2:].copy_(ids[[3, 2]]),  # the images of other pairs
    ],
    ids=["token", "place", "pair"],
)
def test_rows_whose_placeholders_are_not_shared_keep_their_images(model, change):
    ids = IDS.clone()
    change(ids)
    packed = pack(model, call(torch.ones(2, 3, 16, 16), ids))
    assert not packed.shares_images
    assert len(packed.inputs["pixel_values"]) == 2
    assert (packed.inputs["input_ids"] == IMAGE).sum() == 2


def test_unknown_placeholders_are_not_packed(model):
    model.config.image_token_id = None
    with pytest.raises(NotPackable, match="does not tell which tokens stand for images"):
        pack(model, call(torch.ones(2, 3, 16, 16)))


def test_arguments_of_other_kinds_are_named(model):
    pixels = torch.ones(2, 3, 16, 16)
    assert images.unsupported_reason(model, call(pixels, token_type_ids=MASK)) is None
    reason = images.unsupported_reason(model, call(pixels, token_type_ids=MASK[:, :2]))
    assert reason == "argument token_type_ids is neither of tokens nor of images"
    reason = images.unsupported_reason(model, call([pixels]))
    assert reason == "argument pixel_values is neither of tokens nor of images"
    reason = images.unsupported_reason(tiny_model(), call(pixels))
    assert reason == "argument pixel_values is not supported for a model of text"


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3_vl", "qwen3_5", "smolvlm", "mistral3"])
def test_exact_in_float64(name):
    """On text and on images, with and without sharing them."""
    with float64_throughout():
        errors = errors_of(name)
    assert len(errors) == 4
    assert max(errors) < 1e-10, "they were up to 1e-11"
