"""Rows that are read once for all layers, and their copies on devices, with stand-ins for streams and captures."""

import gc
import weakref

import pytest
import torch

from fastdpo.ops import devices
from fastdpo.ops.attention import device_layout, flash, routes
from fastdpo.ops.attention.device_layout import AttentionOptions, DeviceLayout, Kind, rows_of
from tests.support.ops.operators import Operators
from tests.support.stand_ins import flash_libraries

pytest.importorskip("triton")

OPTIONS = AttentionOptions(1.0, None, None)


@pytest.fixture(params=["flash-attn-2", "triton"])
def backend(request, monkeypatch):
    monkeypatch.setattr(devices, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setenv(routes.VARIABLE, request.param)
    flash_libraries.install(monkeypatch)
    yield routes.BACKENDS[request.param]
    flash_libraries.forget()


@pytest.fixture
def stream(monkeypatch):
    """A function that sets the current stream, and whether it captures a CUDA graph."""

    def use(name, captures=False):
        monkeypatch.setattr(routes, "current_stream", lambda device: (name, captures))
        for module in (routes, device_layout):
            monkeypatch.setattr(module, "is_capturing", lambda device: captures)

    return use


def rows_of_two(first):
    return torch.tensor([[0, 0, 0, first], [0, 1, first, 2]], dtype=torch.int32, device="cpu")


def layout_of(rows, tokens):
    query = torch.empty(tokens, 2, 16, dtype=torch.float16, device="cpu")
    return routes.prepare(query, query, rows, OPTIONS).layout


def test_a_layout_is_kept_for_as_long_as_the_memory_of_its_rows(backend):
    rows = rows_of_two(9)
    layout = layout_of(rows, 11)
    for x in (rows, rows[:], rows.detach()):
        assert layout_of(x, 11) is layout
    kept = weakref.ref(rows_of(rows, 11))
    mask = rows[None, None]
    del rows, layout, x
    gc.collect()
    assert kept() is not None
    assert rows_of(mask.flatten(0, 2), 11) is kept()
    del mask
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("as_mask", [False, True])
def test_rows_with_other_values_are_read_again(as_mask):
    """Others of the same memory, and those that were written to."""
    both = torch.cat([rows_of_two(9), rows_of_two(7)])
    masks = [x[None, None] if as_mask else x for x in both.split(2)]
    for _ in range(2):
        for mask, length in zip(masks, (11, 9), strict=True):
            assert rows_of(mask, length).longest == max(length - 2, 3)
    masks[1].copy_(masks[1].new_tensor([[0, 0, 0, 2], [0, 1, 2, 7]]))
    assert rows_of(masks[1], 9).longest == 8


def test_rows_on_a_device_are_read_once(monkeypatch):
    """Hooks of accelerate move a mask to the device of each layer."""
    monkeypatch.setattr(device_layout, "is_host", lambda device: False)
    assert rows_of(rows_of_two(9), 11) is rows_of(rows_of_two(9)[None, None], 11)


def test_each_stream_has_a_copy_and_a_capture_takes_an_earlier_one(backend, stream):
    rows = rows_of_two(9)
    stream("first")
    layout = layout_of(rows, 11)
    stream("second")
    other = layout_of(rows, 11)
    assert other is not layout
    stream("graph", captures=True)
    assert layout_of(rows, 11) is other
    stream("first")
    assert layout_of(rows, 11) is layout
    stream("graph", captures=True)
    message = (
        "^packed_attention: rows must be used in a call before a CUDA graph captures them.*; got rows that no call"
    )
    with pytest.raises(ValueError, match=message):
        layout_of(rows_of_two(8), 10)


def test_a_layout_is_one_copy(backend):
    query = torch.empty(11, 2, 16, dtype=torch.float16, device="cpu")
    described = backend.call(Kind.of(query, query, OPTIONS)).describe(rows_of(rows_of_two(9), 11))
    with Operators() as operators:
        layout = DeviceLayout(described, torch.device("meta"))
    copies = [(args, result) for func, args, result in operators.calls if "copy" in str(func)]
    devices_of_copies = [{x.device.type for x in (*args, result) if hasattr(x, "device")} for args, result in copies]
    assert devices_of_copies.count({"cpu", "meta"}) == 1
    assert layout.contents._fields == described._fields


def test_room_holds_what_stands_for_nothing():
    """The interpreted tests run kernels with it."""
    longer, shorter = (flash.varlen_layout(rows_of(rows_of_two(first), first + 2)) for first in (9, 4))
    layout = DeviceLayout(longer, torch.device("cpu"), sizes=[5, 5, 9, 9, 12, 12, 12])
    layout.fill(shorter)
    cu_queries, cu_keys, _, max_keys, places = layout.contents
    assert cu_queries.tolist() == [0, 4, 6, 6, 6]
    assert cu_keys.tolist() == [0, 4, 7, 7, 7]
    assert max_keys == 9
    assert places.index.tolist() == [0, 1, 2, 3, 0, 4, 5, 5, 5, 5, 5, 5]
