"""A cache of layouts in GPU memory that are used on several streams and by CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ... import checks
from ..devices import is_capturing

L = TypeVar("L", bound=tuple)


class LayoutCache(Generic[L]):
    """The last layouts that a function computed, by its arguments.

    A stream other than the one that copied a layout to the device waits for the copy when it first
    uses the layout, and memory is not used again before all of these streams have read it.

    A CUDA graph reads the memory of its layouts whenever it is replayed, which the host does not
    see. Layouts that were used while a stream captured a graph are therefore kept for good. They
    are not counted in `size`.

    Args:
        compute: called with the name of the op, the device and further hashable arguments. Returns
            a layout, a tuple of tensors on the device, of values, and of further such tuples.
        size: the number of layouts that are kept.
    """

    def __init__(self, compute: Callable[..., L], size: int) -> None:
        self._compute, self._size = compute, size
        self._entries: dict[tuple[Hashable, ...], _Entry[L]] = {}  # the least recently used first
        self._lock = Lock()

    def get(self, op: str, device: torch.device, *arguments: Hashable) -> L:
        """The layout, which the current stream of the device may read.

        Raises:
            ValueError: the stream captures a CUDA graph, and the layout is not in the cache. Its
                copy would become a part of the graph, and the layout would hold no values until
                the graph is replayed.
        """
        key = (op, device, *arguments)
        capturing = is_capturing(device)
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                rule = "be used in a call before a CUDA graph captures them, as in the usual warm-up"
                checks.require(not capturing, op, "rows", rule, "rows that no recent call has used")
                entry = _Entry(self._compute(op, device, *arguments), device)
            self._entries[key] = entry
            if capturing:
                entry.captured = True
            else:
                entry.order()
            evictable = [key for key, entry in self._entries.items() if not entry.captured]
            for key in evictable[: -self._size]:
                del self._entries[key]
            return entry.layout


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
    for x in layout:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors_of(x)
