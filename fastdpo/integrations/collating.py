"""Batches that are packed where they are collated, in a worker process of the loader if there is one.

The host has their ids there. Once a batch is on a device, packing it would have to wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from ..models.batch import PackedBatch, PaddedBatch
from ..ops.devices import is_host
from ..packing import Form, Groups, Layout, NotPackable
from .replacements import temporarily

REPLACED = ("get_train_dataloader", "_prepare_inputs")
"""Functions of a trainer that a line replaces whose batches come with their layouts."""

How = tuple[Groups | None, int | None]
"""How a batch is packed: which of its rows may share a prefix, and the id of padding in a batch of a reward model."""


class CollatedBatch(dict[str, Any]):
    """A batch that has come with its layout.

    Attributes:
        packed: its tensors as they were collated or moved, with the layout. None after something else than `to` has
            made another batch of it.
    """

    packed: PackedBatch | None = None
    _how: How

    @classmethod
    def of(cls, tensors: dict[str, Any], layout: Layout, how: How, padded: PaddedBatch | None = None) -> CollatedBatch:
        """A batch with its layout, on the device of both.

        Args:
            tensors: the batch.
            layout: of the batch.
            how: it was packed.
            padded: its rows, if they were made before.
        """
        batch, padded = cls(tensors), padded or cast(PaddedBatch, PaddedBatch.of_collated(tensors, how[1]))
        sources = [tensors[name] for name in ("input_ids", "completion_mask") if name in tensors]
        batch.packed, batch._how = PackedBatch(padded, sources), how
        batch.packed.layouts[Form(how[0])] = layout
        return batch

    def to(self, device: Any, **options: Any) -> dict[str, Any]:
        """The batch on a device, as accelerate moves it, with its layout."""
        moved = cast(dict[str, Any], send_to_device(dict(self), device, **options))
        packed, layout = self.packed, self._present_layout()
        if packed is None or layout is None:
            return moved
        if not {*map(id, (*packed.padded[:2], *packed.sources))}.issubset(map(id, moved.values())):
            return CollatedBatch.of(moved, layout.to(moved["input_ids"].device), self._how)
        batch = CollatedBatch(moved)  # of the tensors that were collated: on the CPU, nothing is moved
        batch.packed, batch._how = packed, self._how
        return batch

    def __reduce__(self) -> tuple:
        """A layout is copied between processes: shared memory for each of its small tensors would take longer."""
        layout = self._present_layout()
        if layout is None:
            return dict, (dict(self),)
        arrays = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in vars(layout).items()}
        return _restored, (dict(self), arrays, self._how)

    def _present_layout(self) -> Layout | None:
        """The layout, unless code that had the batch after its collation has changed it."""
        if self.packed is None or not self.packed.equals(PaddedBatch.of_collated(self, self._how[1])):
            return None
        return self.packed.layouts[Form(self._how[0])]


def _restored(tensors: dict[str, Any], arrays: dict[str, Any], how: How) -> CollatedBatch:
    made: Any = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    return CollatedBatch.of(tensors, Layout(**made), how)


def with_layout(batch: Any, groups: Groups | None, padding: int | None = None) -> Any:
    """A batch that a collator has made, packed if it can be: that of a reward model if it has an id of padding."""
    padded = PaddedBatch.of_collated(batch, padding) if type(batch) is dict else None
    if padded is None or padded.form_reason() is not None or not all(is_host(x.device) for x in padded[:3]):
        return batch
    try:
        layout = padded.pack(Form(groups))
    except (NotPackable, ValueError):  # the model's call says why
        return batch
    return CollatedBatch.of(batch, layout, (groups, padding), padded)


def collate(stock: Callable[[Any], Any], groups: Groups | None, padding: int | None, examples: Any) -> Any:
    """The batch of another collator, packed."""
    return with_layout(stock(examples), groups, padding)


def packing_batches(trainer: Any, groups: Groups | None, padding: int | None) -> AbstractContextManager[None]:
    """In the block, loaders that a trainer makes have batches that come with their layouts (see `with_layout`)."""
    collator = functools.partial(collate, trainer.data_collator, groups, padding)  # pickled for workers
    return temporarily(trainer, data_collator=collator)
