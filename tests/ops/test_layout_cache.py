"""Cached layouts on several streams and in CUDA graphs, with stand-ins for streams and captures."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastdpo.ops.attention import layout_cache, layouts
from fastdpo.ops.attention.layout_cache import LayoutCache
from fastdpo.ops.attention.layouts import CACHED_LAYOUTS, layout_blocks, varlen_layout

pytest.importorskip("triton")

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def capturing(monkeypatch):
    """A function that says whether the current stream captures a CUDA graph."""
    return lambda flag: monkeypatch.setattr(layout_cache, "is_capturing", lambda device: flag)


def layouts_of(first):
    """Both forms of a layout of two rows, the first of which has the given length."""
    rows = torch.tensor([[0, 0, 0, first], [0, 1, first, 2]], dtype=torch.int32, device="cpu")
    return varlen_layout("op", rows, first + 2, CPU), layout_blocks("op", rows, first + 2, 16, 16, CPU)


def test_layouts_of_a_cuda_graph_are_never_evicted(capturing):
    captured, other = layouts_of(1), layouts_of(2)
    capturing(True)
    assert all(a is b for a, b in zip(layouts_of(1), captured, strict=True))
    capturing(False)
    for first in range(3, 3 + 2 * CACHED_LAYOUTS):
        layouts_of(first)
    assert all(a is b for a, b in zip(layouts_of(1), captured, strict=True))
    assert not any(a is b for a, b in zip(layouts_of(2), other, strict=True))


def test_recently_used_layouts_are_kept(capturing):
    capturing(False)
    kept = layouts_of(100)
    for first in range(101, 100 + 2 * CACHED_LAYOUTS):
        layouts_of(first)
        assert all(a is b for a, b in zip(layouts_of(100), kept, strict=True))
    for cache in (layouts._varlen_layouts, layouts._blocks):
        assert sum(not entry.captured for entry in cache._entries.values()) == CACHED_LAYOUTS


def test_a_new_layout_within_a_capture_raises(capturing):
    capturing(True)
    message = r"^op: rows must be used in a call before a CUDA graph captures them.*; got rows that no recent call"
    with pytest.raises(ValueError, match=message):
        layouts_of(200)
    capturing(False)
    layouts_of(200)


class Places(NamedTuple):
    index: Tensor


class Layout(NamedTuple):
    offsets: Tensor
    longest: int
    places: Places | None


def test_streams_are_ordered_after_the_copy_of_a_layout(capturing, monkeypatch):
    """Each stream other than the copying one waits once and keeps the memory from being reused too early."""
    done, current = [], SimpleNamespace()

    class Stream:
        def wait_event(self, event):
            done.append((self, "waits for", event))

    class Event:
        def record(self, stream):
            done.append((stream, "records", self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current.stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: done.append((stream, "reads", x.data_ptr())))
    capturing(False)
    layout = Layout(torch.zeros(3, device="cpu"), 7, Places(torch.zeros(4, device="cpu")))
    cache = LayoutCache(lambda op, device, number: layout, 2)

    copying, other = Stream(), Stream()
    for current.stream in (copying, copying):
        assert cache.get("op", GPU, 1) is layout
    assert [what[:2] for what in done] == [(copying, "records")]
    event = done.pop()[2]

    capturing(True)
    current.stream = other  # an event from outside of a graph must not enter it
    cache.get("op", GPU, 1)
    assert not done

    capturing(False)
    for _ in range(2):
        cache.get("op", GPU, 1)
    reads = [(other, "reads", x.data_ptr()) for x in (layout.offsets, layout.places.index)]
    assert done == [(other, "waits for", event), *reads]
