"""Digests of the images of each row of a padded batch, as the model gets them.

A batch holds the images of all rows one after the other, and not how many each row has. That follows
from how many placeholders each row has and how many stand for each image.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..reasons import Reason
from .images import OF_TOKENS, images_of, placeholder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRID, POSITIONS, SIZES, MASK = "image_grid_thw", "image_position_ids", "image_sizes", "pixel_attention_mask"


def digests_of_rows(model: PreTrainedModel, batch: dict[str, Any]) -> list[bytes] | Reason:
    """The digest of each row's images and types of tokens, or why they cannot be told apart by row.

    It does not depend on how far images and rows are padded. Images are copied to the host.

    Args:
        model: the model that the batch is for.
        batch: with `input_ids`, `attention_mask` and the arguments of images.
    """
    real = batch["attention_mask"] != 0
    digests = [hashlib.blake2b(digest_size=16) for _ in real]
    for name in OF_TOKENS:
        if batch.get(name) is not None:
            for digest, row, kept in zip(digests, batch[name].cpu(), real.cpu(), strict=True):
                _update(digest, row[kept])
    found = images_of(batch)
    given = {} if found is None else {name: x.cpu() for name, x in found.of_images.items()}
    if given:
        token = placeholder(model)
        counts = ((batch["input_ids"] == token) & real).sum(1).tolist()
        owners = None if token is None else _owners(given, counts)
        if owners is None:
            return Reason("image-owners", names=", ".join(sorted(given)))
        for owner, parts in owners:
            for part in parts:
                _update(digests[owner], part)
    return [digest.digest() for digest in digests]


def _update(digest: Any, x: Tensor) -> None:
    digest.update(repr((x.dtype, tuple(x.shape))).encode())
    digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _owners(given: dict[str, Tensor], counts: list[int]) -> list[tuple[int, tuple[Tensor, ...]]] | None:
    """The row of each image, and what the image consists of. None if that cannot be told.

    `counts` are the numbers of placeholders of the rows.
    """
    pixels = given.get("pixel_values")
    if pixels is None:
        return None
    if pixels.dim() == 5 and len(pixels) == len(counts) and given.keys() <= {"pixel_values", MASK}:
        return [
            (row, (image,)) for row, of_row in enumerate(_rows_of_images(pixels, given.get(MASK))) for image in of_row
        ]
    weights, images = _weighted(given, pixels)
    if not weights:
        return None
    # Each image has placeholders in proportion to its weight, and each row has those of whole images.
    total, tokens = sum(weights), sum(counts)
    ends = [end * tokens for end in itertools.accumulate(weights)]
    bounds = [end * total for end in itertools.accumulate(counts)]
    if not tokens or not {*bounds} <= {0, *ends}:
        return None
    owner = [next(row for row, bound in enumerate(bounds) if end <= bound) for end in ends]
    return [*zip(owner, images, strict=True)]


def _weighted(given: dict[str, Tensor], pixels: Tensor) -> tuple[list[int], list[tuple[Tensor, ...]]]:
    """The weight and the content of each image; none if the arguments are of another kind."""
    others = given.keys() - {"pixel_values"}
    if not others and pixels.dim() == 4:
        return [1] * len(pixels), [(x,) for x in pixels]
    if others == {GRID} and pixels.dim() == 2 and int(given[GRID].prod(1).sum()) == len(pixels):
        weights = given[GRID].prod(1).tolist()
        return weights, [*zip(pixels.split(weights), given[GRID], strict=True)]
    if others == {SIZES} and pixels.dim() == 4 and len(given[SIZES]) == len(pixels):
        sizes = given[SIZES].tolist()
        if all(h <= pixels.shape[2] and w <= pixels.shape[3] for h, w in sizes):
            return [h * w for h, w in sizes], [(x[:, :h, :w],) for x, (h, w) in zip(pixels, sizes, strict=True)]
    if others == {POSITIONS} and pixels.dim() == 3 and len(given[POSITIONS]) == len(pixels):
        kept = (given[POSITIONS] >= 0).all(-1)
        parts = zip(pixels, given[POSITIONS], kept, strict=True)
        return kept.sum(1).tolist(), [(x[here], position[here]) for x, position, here in parts]
    return [], []


def _rows_of_images(pixels: Tensor, mask: Tensor | None) -> Iterator[list[Tensor]]:
    """The images of each row [R, images, channels, height, width], without padding."""
    for row in range(len(pixels)):
        images = []
        for i, image in enumerate(pixels[row]):
            if mask is not None:
                seen = mask[row, i] != 0
                image = image[:, : int(seen.any(1).sum()), : int(seen.any(0).sum())]
            if image.any():  # otherwise the model drops it
                images.append(image)
        yield images
