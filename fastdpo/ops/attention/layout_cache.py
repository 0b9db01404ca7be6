"""A cache of layouts in GPU memory that are used on several streams and by CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ... import checks
from ..devices import is_capturing, is_host
from .calls import OP

L = TypeVar("L", bound=tuple)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A part of a layout as int32 on the device, without a synchronization.

    Raises:
        ValueError: the stream captures a CUDA graph. The copy would become a part of the graph, and
            the layout would hold no values until the graph is replayed.
    """
    rule = "be used in a call before a CUDA graph captures them, as in the usual warm-up"
    checks.require(not is_capturing(device), OP, "rows", rule, "rows that no recent call has used")
    x = x.int()
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class LayoutCache(Generic[L]):
    """The layouts that were used last.

    A stream other than the one that copied a layout to the device waits for the copy when it first
    uses the layout, and memory is not used again before all of these streams have read it.

    A CUDA graph reads the memory of its layouts whenever it is replayed, which the host does not
    see. Layouts that were used while a stream captured a graph are therefore kept for good. They
    are not counted in `size`.

    Args:
        size: the number of layouts that are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[Hashable, _Entry[L]] = {}  # the least recently used first
        self._lock = Lock()

    def get(self, device: torch.device, key: Hashable, compute: Callable[[], L]) -> L:
        """The layout of a key, which the current stream of the device may read.

        Args:
            device: of the layout.
            key: everything that the layout depends on, the device among it.
            compute: makes the layout, a tuple of tensors, of values, and of further such tuples.
        """
        found = self._entries.get(key)
        entry = found or _Entry(compute(), device)
        with self._lock:
            entry = self._entries.pop(key, entry)
            self._entries[key] = entry
            if is_capturing(device):
                entry.captured = True
            else:
                entry.order()
            if found is None:
                evictable = [key for key, entry in self._entries.items() if not entry.captured]
                for key in evictable[: -self._size]:
                    del self._entries[key]
            return entry.layout

    def clear(self) -> None:
        """Forgets all layouts, those of CUDA graphs among them."""
        with self._lock:
            self._entries.clear()


class _Entry(Generic[L]):
    """A layout, and the streams that may read it.

    Attributes:
        captured: whether a CUDA graph may read the layout.
    """

    def __init__(self, layout: L, device: torch.device) -> None:
        self.layout, self.captured = layout, False
        self._device, self._streams = device, set()
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
            self._streams.add(stream)

    def order(self) -> None:
        """Orders the current stream after the copy, and the release of the memory after the stream.

        A capturing stream must not wait for an event from outside of its graph. It does not need
        to: `torch.cuda.graph` waits for the device before the capture begins.
        """
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if stream not in self._streams:
            stream.wait_event(self._copied)
            for x in _tensors_of(self.layout):
                x.record_stream(stream)
            self._streams.add(stream)


def _tensors_of(layout: tuple) -> Iterator[Tensor]:
    """Those on the device."""
    for x in layout:
        if isinstance(x, Tensor) and not is_host(x.device):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors_of(x)
