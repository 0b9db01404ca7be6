"""Tiny DPO trainings in TRL on pairs with images, with processors that are built in place.

The processors of Qwen-VL and of Pixtral need torchvision, for which there is no build next to the
CPU build of torch that the tests run with. `PlaceholderProcessor` takes their place: it uses their
image processors, which need PIL only.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.feature_extraction_utils import BatchFeature
from trl import DPOTrainer

from tests.support.models.multimodal import IMAGE, tiny_multimodal
from tests.support.trl.dpo import WORDS, Run, config, record, train_both
from tests.support.words import word_tokenizer

PLAIN = 80
"""Number of words that texts are made of. The last ones are special tokens of the processors."""


def tokenizer(image_token: str, **special: str) -> PreTrainedTokenizerFast:
    """`trl.dpo.tokenizer`, whose last words are special tokens. `image_token` has the id `IMAGE`."""
    words = [*WORDS[: -1 - len(special)], *special.values(), image_token]
    return word_tokenizer(words, extra_special_tokens=special | {"image_token": image_token})


class PlaceholderProcessor(ProcessorMixin):
    """Replaces each image token of a text by as many as the image has features."""

    def __init__(self, image_processor=None, tokenizer=None, types: bool = False, features: int | None = None):
        """`types`: whether it returns `mm_token_type_ids`. `features`: their number for each image, if fixed."""
        self.image_processor, self.tokenizer, self.types, self.features = image_processor, tokenizer, types, features

    def __call__(self, images=None, text=None, return_tensors=None, **options) -> BatchFeature:
        of_images: dict[str, Any] = {}
        counts: list[int] = []
        if images is not None:
            flat = [image for of_row in images for image in of_row]
            of_images = dict(self.image_processor(images=flat, return_tensors="pt"))
            counts = [self.features] * len(flat) if self.features is not None else self._counts(of_images)
        remaining = iter(counts)
        token = self.tokenizer.image_token
        expanded = []
        for row in text:
            first, *others = row.split(token)
            expanded.append(first + "".join(" ".join([token] * next(remaining)) + other for other in others))
        tokens = self.tokenizer(expanded, return_tensors=return_tensors, **options)
        if self.types:
            tokens["mm_token_type_ids"] = (tokens["input_ids"] == IMAGE).long()
        return BatchFeature({**tokens, **of_images})

    def _counts(self, of_images: dict[str, torch.Tensor]) -> list[int]:
        if "num_soft_tokens_per_image" in of_images:
            return of_images.pop("num_soft_tokens_per_image").tolist()
        if "image_grid_thw" in of_images:
            merged = self.image_processor.merge_size**2
            return [int(grid.prod()) // merged for grid in of_images["image_grid_thw"]]
        patch = self.image_processor.patch_size["height"]
        return [int(height // patch * (width // patch)) for height, width in of_images["image_sizes"]]


@dataclass(frozen=True)
class VisionFamily:
    """How a family takes images.

    Attributes:
        processor: builds a processor of images of 16 x 16 pixels.
        image: the text that stands for an image.
        rest: entries of the model's configuration.
        islands: in which layers the tokens of an image see each other in both directions.
    """

    processor: Callable[[], ProcessorMixin]
    image: str
    rest: dict[str, Any] = field(default_factory=dict)
    islands: str = ""


def _llava() -> ProcessorMixin:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = dict(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    options = dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    return LlavaProcessor(CLIPImageProcessorPil(**size), tokenizer("<image>"), **options)


def llava_with_chat_template() -> ProcessorMixin:
    """A processor of conversations, which can be saved."""
    processor = _llava()
    processor.chat_template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }} {% endfor %}{% endfor %}"
    )
    return processor


def _idefics3() -> ProcessorMixin:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    size = {"longest_edge": 16}
    special = dict(around="<fake_token_around_image>", whole="<global-img>", end="<end_of_utterance>")
    return Idefics3Processor(
        Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False),
        tokenizer("<image>", **special),
        image_seq_len=4,
    )


def _gemma3() -> ProcessorMixin:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    size = {"height": 16, "width": 16}
    special = dict(boi_token="<begin>", eoi_token="<end>")
    return Gemma3Processor(Gemma3ImageProcessorPil(size=size), tokenizer("<image>", **special), image_seq_length=4)


def _gemma4() -> ProcessorMixin:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)  # 8 x 8
    return PlaceholderProcessor(images, tokenizer("<image>"), types=True)


def _mistral3() -> ProcessorMixin:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    images = PixtralImageProcessorPil(size={"longest_edge": 16}, patch_size={"height": 8, "width": 8})
    return PlaceholderProcessor(images, tokenizer("<image>"))


def _qwen() -> ProcessorMixin:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024)
    return PlaceholderProcessor(images, tokenizer("<image>", start="<start>", end="<stop>"), types=True)


def _glm() -> ProcessorMixin:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    size = dict(shortest_edge=512, longest_edge=2048)  # in pixels of two frames
    images = Glm4vImageProcessorPil(patch_size=4, size=size)
    return PlaceholderProcessor(images, tokenizer("<image>", start="<start>", end="<stop>"), types=True)


def _llava_next() -> ProcessorMixin:
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    size = dict(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 16]])
    return PlaceholderProcessor(LlavaNextImageProcessorPil(**size), tokenizer("<image>"), features=16 + 4 * 5)


def _fixed(features: int) -> ProcessorMixin:
    """Images as [images, 3, 16, 16], which is what most processors return."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    return PlaceholderProcessor(images, tokenizer("<image>"), features=features)


def _lfm2() -> ProcessorMixin:
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    images = Siglip2ImageProcessorPil(patch_size=4, max_num_patches=16)
    return PlaceholderProcessor(images, tokenizer("<image>"), features=4)


AROUND = dict(vision_start_token_id=len(WORDS) - 3, vision_end_token_id=len(WORDS) - 2)
QWEN = VisionFamily(_qwen, "<start> <image> <stop>", AROUND)
GLM_AROUND = dict(image_start_token_id=len(WORDS) - 3, image_end_token_id=len(WORDS) - 2)
GLM = VisionFamily(_glm, "<start> <image> <stop>", GLM_AROUND)
FOUR, SIXTEEN = (VisionFamily(functools.partial(_fixed, n), "<image>") for n in (4, 16))
FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily(_gemma3, "<begin>", islands="all layers"),
    "gemma4": VisionFamily(_gemma4, "<image>", islands="layers with a window"),
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN,
    "qwen3_5": QWEN,
    "lfm2_vl": VisionFamily(_lfm2, "<image>"),
    "glm4v": GLM,
    "glm46v": GLM,
    "mistral3": VisionFamily(_mistral3, "<image>"),
    "lighton_ocr": VisionFamily(_mistral3, "<image>"),
    "llava_next": VisionFamily(_llava_next, "<image>"),
    "idefics3": VisionFamily(_idefics3, "<image>"),
    "smolvlm": VisionFamily(_idefics3, "<image>"),
    "llava": VisionFamily(_llava, "<image>"),
    "vipllava": VisionFamily(_llava, "<image>"),
    "deepseek_vl": SIXTEEN,
    "internvl": FOUR,
    "aya_vision": FOUR,
    "cohere2_vision": FOUR,
}
"""Maps a model type to how it takes images."""


def picture(rng: np.random.Generator, width: int = 16, height: int = 16) -> Image.Image:
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def vision_pairs(name: str, images: tuple[int, ...], seed: int = 0) -> list[dict[str, Any]]:
    """Ragged preference pairs with so many images each. Some answers share a prefix."""
    rng, pixels = random.Random(seed), np.random.default_rng(seed)

    def text(low: int, high: int) -> str:
        return " ".join(f"w{rng.randrange(PLAIN)}" for _ in range(rng.randint(low, high)))

    rows = []
    for n in images:
        prompt = " ".join([text(1, 4), *(f"{FAMILIES[name].image} {text(1, 4)}" for _ in range(n))])
        pictures = [picture(pixels) for _ in range(n)]
        rows.append(dict(images=pictures, prompt=prompt + " ", chosen=text(1, 9), rejected=text(1, 9)))
    rows[1]["chosen"], rows[1]["rejected"] = "w3 w4 w5", "w3 w4 w6 w7"
    return rows


def train_vision(
    name: str,
    directory: Path,
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    *,
    images: tuple[int, ...] = (1, 2, 0, 1, 1, 1, 2, 1),
    evaluate: tuple[int, ...] = (),
    peft_config: Any = None,
    data_collator: Callable | None = None,
    **overrides: Any,
) -> Run:
    """`trl.dpo.train` on pairs with so many images each, in order. `evaluate` are those of an evaluation."""
    processor = FAMILIES[name].processor()
    make = functools.partial(
        DPOTrainer,
        model=model,
        ref_model=reference,
        args=config(directory, train_sampling_strategy="sequential", **overrides),
        train_dataset=Dataset.from_list(vision_pairs(name, images)),
        eval_dataset=Dataset.from_list(vision_pairs(name, evaluate, seed=1)) if evaluate else None,
        processing_class=processor,
        peft_config=peft_config,
        data_collator=data_collator,
    )
    return record(make, evaluate=bool(evaluate))


def train_vision_both(directory: Path, name: str, **options: Any) -> list[Run]:
    """`trl.dpo.train_both` of two steps on pairs with images. `options` are those of `train_vision`, too."""
    train = functools.partial(train_vision, name)
    options = dict(max_steps=2) | options
    return train_both(directory, name, FAMILIES[name].rest, build=tiny_multimodal, train=train, **options)
