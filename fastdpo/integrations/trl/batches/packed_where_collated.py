"""Batches that are packed where they are collated, in a worker process of the loader if there is one.

The host has their ids there. Once a batch is on a device, packing it would have to wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from ....models import layouts, reward_head
from ....models.layouts import PaddedBatch
from ....models.state import Groups
from ....packing import IGNORE_INDEX, Layout, NotPackable
from ...line import TrainerLine
from ...replacements import temporarily


class CollatedBatch(dict[str, Any]):
    """A batch that may have come with its layout on the host.

    Attributes:
        layout: of the batch; None after something else than `to` has made another batch of it.
        groups: which rows of the layout may share a prefix.
        padding: the id of padding, in a batch of a reward model.
    """

    layout: Layout | None = None
    groups: Groups | None = None
    padding: int | None = None

    def to(self, device: Any, **options: Any) -> dict[str, Any]:
        """The batch on a device, as accelerate moves it, with its layout kept for the model's call."""
        moved = cast(dict[str, Any], send_to_device(dict(self), device, **options))
        if self.layout is not None:
            layouts.keep(moved, self.groups, self.layout.to(moved["input_ids"].device), self.padding)
        return moved

    def __reduce__(self) -> tuple:
        """A layout is copied between processes: shared memory for each of its small tensors would take longer."""
        fields = {} if self.layout is None else vars(self.layout)
        arrays = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in fields.items()}
        return _restored, (dict(self), arrays, self.groups, self.padding)


def _restored(
    tensors: dict[str, Any], arrays: dict[str, Any], groups: Groups | None, padding: int | None
) -> CollatedBatch:
    batch = CollatedBatch(tensors)
    if arrays:
        fields: dict[str, Any] = {
            name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()
        }
        batch.layout, batch.groups, batch.padding = Layout(**fields), groups, padding
    return batch


class PackingCollator:
    """Packs the batches of another collator, those of a reward model if it has an id of padding."""

    def __init__(self, stock: Callable[[Any], Any], groups: Groups | None, padding: int | None = None) -> None:
        self.stock, self.padding = stock, padding
        self.groups: Groups | None = groups

    def __call__(self, examples: Any) -> Any:
        batch = self.stock(examples)
        padded = _padded(batch, self.padding) if type(batch) is dict else None
        if padded is None:
            return batch
        collated = CollatedBatch(batch)
        collated.padding = self.padding
        try:
            collated.layout, collated.groups = layouts.pack(padded, self.groups), self.groups
        except (NotPackable, TypeError, ValueError):  # the model's call says why
            return batch
        return collated


def with_packed_batches(
    line: TrainerLine, stock: Callable, trainer: Any, *args: Any, padding: int | None = None, **kwargs: Any
) -> Any:
    """The loader that a trainer's own function makes, with batches that come with their layouts.

    Args:
        line: of the trainer.
        stock: its function.
        trainer: any trainer of the class.
        padding: the id of padding, if the trainer trains a reward model.
    """
    state = line.state_of(trainer)
    if state is None or state.budget is not None:  # which cuts the batches anew
        return stock(trainer, *args, **kwargs)
    groups = line.groups if line.options.share_prompts else None
    with temporarily(trainer, data_collator=PackingCollator(trainer.data_collator, groups, padding)):
        return stock(trainer, *args, **kwargs)


def _padded(batch: dict[str, Any], padding: int | None) -> PaddedBatch | None:
    """The batch with its labels, if it has the entries of text."""
    ids, mask, labels, completions = map(batch.get, ("input_ids", "attention_mask", "labels", "completion_mask"))
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.device.type == mask.device.type == "cpu"):
        return None
    is_scored = padding is not None
    if is_scored:
        labels = reward_head.labels_of(ids, padding)
    elif labels is None and isinstance(completions, Tensor) and completions.shape == ids.shape:
        labels = ids.masked_fill(completions == 0, IGNORE_INDEX)
    return PaddedBatch(ids, mask, labels, shifted=is_scored) if isinstance(labels, Tensor) else None
