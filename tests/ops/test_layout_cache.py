"""Cached layouts on several streams and in CUDA graphs, with stand-ins for streams and captures."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastdpo.ops import devices
from fastdpo.ops.attention import backends, layout_cache
from fastdpo.ops.attention.backends import KEPT_PLANS
from fastdpo.ops.attention.calls import AttentionOptions
from fastdpo.ops.attention.layout_cache import LayoutCache
from tests.support.stand_ins import flash_libraries

pytest.importorskip("triton")

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
OPTIONS = AttentionOptions(1.0, None, None)


@pytest.fixture
def capturing(monkeypatch):
    """A function that says whether the current stream captures a CUDA graph."""
    return lambda flag: monkeypatch.setattr(layout_cache, "is_capturing", lambda device: flag)


@pytest.fixture(params=["flash-attn-2", "triton"])
def layout_of(request, monkeypatch):
    """A function that returns the prepared call of a layout of two rows, the first of which has the given length."""
    monkeypatch.setattr(devices, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setenv(backends.VARIABLE, request.param)
    flash_libraries.install(monkeypatch)

    def call_of(first):
        rows = torch.tensor([[0, 0, 0, first], [0, 1, first, 2]], dtype=torch.int32, device="cpu")
        query = torch.empty(first + 2, 2, 16, dtype=torch.float16, device="cpu")
        return backends.plan(query, query, rows, OPTIONS).call

    yield call_of
    flash_libraries.forget()


def test_layouts_of_a_cuda_graph_are_never_evicted(capturing, layout_of):
    captured, other = layout_of(1), layout_of(2)
    capturing(True)
    assert layout_of(1) is captured
    capturing(False)
    for first in range(3, 3 + 2 * KEPT_PLANS):
        layout_of(first)
    assert layout_of(1) is captured
    assert layout_of(2) is not other


def test_recently_used_layouts_are_kept(capturing, layout_of):
    capturing(False)
    kept = layout_of(100)
    others = {}
    for first in range(101, 100 + 2 * KEPT_PLANS):
        others[first] = layout_of(first)
        assert layout_of(100) is kept
    assert sum(layout_of(first) is others[first] for first in reversed(others)) == KEPT_PLANS - 1


def test_a_new_layout_within_a_capture_raises(capturing, layout_of):
    capturing(True)
    message = (
        "^packed_attention: rows must be used in a call before a CUDA graph captures them.*; got rows that no recent"
    )
    with pytest.raises(ValueError, match=message):
        layout_of(200)
    capturing(False)
    layout_of(200)


class Places(NamedTuple):
    index: Tensor


class Layout(NamedTuple):
    offsets: Tensor
    on_the_host: Tensor
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
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: done.append((stream, "reads", id(x))))
    capturing(False)
    layout = Layout(torch.zeros(3, device="meta"), torch.zeros(2, device="cpu"), Places(torch.zeros(4, device="meta")))
    cache = LayoutCache(2)

    copying, other = Stream(), Stream()
    for current.stream in (copying, copying):
        assert cache.get(GPU, 1, lambda: layout) is layout
    assert [what[:2] for what in done] == [(copying, "records")]
    event = done.pop()[2]

    capturing(True)
    current.stream = other  # an event from outside of a graph must not enter it
    cache.get(GPU, 1, lambda: layout)
    assert not done

    capturing(False)
    for _ in range(2):
        cache.get(GPU, 1, lambda: layout)
    reads = [(other, "reads", id(x)) for x in (layout.offsets, layout.places.index)]
    assert done == [(other, "waits for", event), *reads]
