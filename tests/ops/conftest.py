"""What the tests of the ops share: the size of tiles, and a record of the memory and the products of a call."""

import json
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch

from fastdpo.ops import logit_rows
from fastdpo.ops.head_tiles import ALIGNMENT
from fastdpo.ops.token_logps import split_targets


class Trace(NamedTuple):
    """What torch's profiler saw of a call, inside custom ops too."""

    peak: int  # bytes above what was allocated before it
    left: int  # bytes that its result keeps
    largest: int  # bytes of its largest allocation
    products: int  # of matrices
    product_dtypes: set[str]  # of their operands


@pytest.fixture
def rows_of_a_tile(monkeypatch):
    """Sets how many rows of logits a tile has. Passes are made over a third of it at a time."""

    def set_rows(rows, vocabulary, dtype):
        bytes_of_a_row = vocabulary * logit_rows.accumulator(dtype).itemsize
        columns = -(-vocabulary // ALIGNMENT) * ALIGNMENT
        monkeypatch.setattr(logit_rows, "TILE_BYTES", rows * bytes_of_a_row)
        monkeypatch.setattr(logit_rows, "KERNEL_TILE_BYTES", rows * columns * dtype.itemsize)
        monkeypatch.setattr(logit_rows, "TILE_ROWS", 1)
        monkeypatch.setattr(logit_rows, "BLOCK_BYTES", max(1, rows // 3) * bytes_of_a_row)

    return set_rows


@pytest.fixture
def unchecked_targets(monkeypatch):
    """Targets are not compared with the vocabulary on the host, as those of a device are not."""
    monkeypatch.setitem(split_targets.__globals__, "is_host", lambda device: False)


@pytest.fixture
def trace(tmp_path, device):
    """Calls a function; returns its result and the `Trace` of the call."""
    if device != "cpu":
        pytest.skip("the profiler's records are read as those of a CPU")
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
        return result, Trace(max(held), held[-1], max(sizes, default=0), len(products), dtypes)

    return call
