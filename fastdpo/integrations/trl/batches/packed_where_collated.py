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

from ....models import layouts
from ....models.layouts import PaddedBatch
from ....models.state import Groups
from ....models.unseen_writes import are_as_copied, copies_of
from ....ops.devices import is_host
from ....packing import Layout, NotPackable
from ...line import TrainerLine
from ...replacements import temporarily


class CollatedBatch(dict[str, Any]):
    """A batch that may have come with its layout on the host.

    Attributes:
        layout: of the batch as it was collated; None after something else than `to` has made another batch of it.
        groups: which rows of the layout may share a prefix.
        padding: the id of padding, in a batch of a reward model.
        copies: of what the layout was made from (see `unseen_writes`).
    """

    layout: Layout | None = None
    groups: Groups | None = None
    padding: int | None = None
    copies: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, tensors: dict[str, Any], layout: Layout, groups: Groups | None, padding: int | None) -> CollatedBatch:
        batch = cls(tensors)
        batch.layout, batch.groups, batch.padding = layout, groups, padding
        batch.copies = copies_of(cast(PaddedBatch, layouts.padded_batch(batch, padding))[:3])
        return batch

    def to(self, device: Any, **options: Any) -> dict[str, Any]:
        """The batch on a device, as accelerate moves it, with its layout kept for the model's call."""
        moved = cast(dict[str, Any], send_to_device(dict(self), device, **options))
        layout = self._present_layout()
        if layout is not None:
            layouts.keep(moved, self.groups, layout.to(moved["input_ids"].device), self.padding)
        return moved

    def __reduce__(self) -> tuple:
        """A layout is copied between processes: shared memory for each of its small tensors would take longer."""
        layout = self._present_layout()
        if layout is None:
            return CollatedBatch, (dict(self),)
        arrays = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in vars(layout).items()}
        return _restored, (dict(self), arrays, self.groups, self.padding)

    def _present_layout(self) -> Layout | None:
        """The layout, unless code that had the batch after its collation has changed it."""
        padded = layouts.padded_batch(self, self.padding)
        return self.layout if padded is not None and self.copies and are_as_copied(padded[:3], self.copies) else None


def _restored(
    tensors: dict[str, Any], arrays: dict[str, Any], groups: Groups | None, padding: int | None
) -> CollatedBatch:
    fields: dict[str, Any] = {
        name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()
    }
    return CollatedBatch.of(tensors, Layout(**fields), groups, padding)


class PackingCollator:
    """Packs the batches of another collator, those of a reward model if it has an id of padding."""

    def __init__(self, stock: Callable[[Any], Any], groups: Groups | None, padding: int | None = None) -> None:
        self.stock, self.padding = stock, padding
        self.groups: Groups | None = groups

    def __call__(self, examples: Any) -> Any:
        batch = self.stock(examples)
        padded = layouts.padded_batch(batch, self.padding) if type(batch) is dict else None
        if padded is None or not all(is_host(x.device) for x in padded[:3]):
            return batch
        try:
            layout = layouts.pack(padded, self.groups)
        except (NotPackable, TypeError, ValueError):  # the model's call says why
            return batch
        return CollatedBatch.of(batch, layout, self.groups, self.padding)


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
