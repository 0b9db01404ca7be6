"""Fixtures of the tests of ops: small tiles, unchecked targets, and a call's memory and products."""

import json
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch

from fastdpo.ops.devices import accumulation_dtype
from fastdpo.ops.head import logit_rows, results
from fastdpo.ops.head.passes import ALIGNMENT


class Trace(NamedTuple):
    """A call as torch's profiler recorded it, including the inside of custom ops."""

    peak: int  # bytes above those allocated before the call
    left: int  # bytes still allocated after the call
    largest: int  # bytes of the largest allocation
    products: int  # number of matrix products
    product_dtypes: set[str]  # dtypes of their operands
    flops: int  # floating-point operations of the matrix products, two for each multiplication


@pytest.fixture
def rows_of_a_tile(monkeypatch):
    """A function that sets the number of rows of a tile.

    Passes are made over blocks of a third of a tile.
    """

    def set_rows(rows, vocabulary, dtype):
        row_bytes = vocabulary * accumulation_dtype(dtype).itemsize
        columns = -(-vocabulary // ALIGNMENT) * ALIGNMENT
        monkeypatch.setattr(logit_rows, "TILE_BYTES", rows * row_bytes)
        monkeypatch.setattr(logit_rows, "KERNEL_TILE_BYTES", rows * columns * dtype.itemsize)
        monkeypatch.setattr(logit_rows, "FULL_TILE_ROWS", rows)
        monkeypatch.setattr(logit_rows, "MIN_TILE_ROWS", 1)
        monkeypatch.setattr(logit_rows, "BLOCK_BYTES", max(1, rows // 3) * row_bytes)

    return set_rows


@pytest.fixture
def unchecked_targets(monkeypatch):
    """Skips the host's check that targets are in the vocabulary, as for targets on a device."""
    monkeypatch.setattr(results, "is_host", lambda device: False)


@pytest.fixture
def trace(tmp_path, device):
    """A function that calls another and returns its result with the `Trace` of the call."""
    if device != "cpu":
        pytest.skip("reads the profiler's records of a CPU")
    path = tmp_path / "trace.json"

    def call(function):
        options = {"activities": [torch.profiler.ProfilerActivity.CPU], "profile_memory": True, "record_shapes": True}
        with torch.profiler.profile(**options) as profile:
            result = function()
        profile.export_chrome_trace(str(path))
        events = sorted(json.loads(path.read_text())["traceEvents"], key=lambda event: event["ts"])
        sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
        held = list(accumulate(sizes, initial=0))
        products = [event for event in events if event["name"] in ("aten::mm", "aten::addmm")]
        dtypes = {dtype for event in products for dtype in event["args"]["Input type"] if dtype not in ("", "Scalar")}
        shapes = [event["args"]["Input Dims"][event["name"] == "aten::addmm" :][:2] for event in products]
        flops = sum(2 * n * k * m for (n, k), (_, m) in shapes)
        return result, Trace(max(held), held[-1], max(sizes, default=0), len(products), dtypes, flops)

    return call
