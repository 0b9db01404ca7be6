"""Reads of values on a device, by the code that asks for them: there, the host waits for the device."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastdpo import packing
from fastdpo.models import batch
from fastdpo.ops.devices import is_host
from tests.support import ROOT

READING = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"),
    *("nonzero", "masked_select", "unique", "bincount", "equal", "allclose", "argwhere"),
}
INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}
HOST = (
    *("fastdpo/packing.py", "fastdpo/ops/", "fastdpo/kernels/", "kernels/"),
    "fastdpo/models/batch.py:raise_if_written",
)
"""Code that may read: of tensors that have been copied to the host, and of ops, which have tests of their own."""


class Reads(TorchFunctionMode):
    """Counts the reads of a block, as if all tensors were on a device.

    Attributes:
        own: those that fastdpo's code asks for, by file, function and operation.
        others: those of other code.
        packed: the number of batches that were packed in the block, each with one copy to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own: Counter[tuple[str, str, str]] = Counter()
        self.others: Counter[tuple[str, str, str]] = Counter()
        self.packed = 0

    def __enter__(self) -> Reads:
        self._make_layout = packing.make_layout

        def make_layout(*args: Any, **options: Any) -> packing.Layout:
            self.packed += 1
            return self._make_layout(*args, **options)

        packing.make_layout, batch.is_host = make_layout, lambda device: False
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        packing.make_layout, batch.is_host = self._make_layout, is_host
        super().__exit__(*error)

    def __torch_function__(self, function: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READING or (name in INDEXING and _has_mask(args[1])):
            file, caller = _asking()
            if not f"{file}:{caller}".startswith(HOST):
                (self.own if file.startswith("fastdpo/") else self.others)[file, caller, name] += 1
        return function(*args, **(kwargs or {}))


def _has_mask(index: object) -> bool:
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in parts)


def _asking() -> tuple[str, str]:
    """The file and the function that ask: the innermost ones outside of torch."""
    frame = sys._getframe(2)
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "", ""
    path = Path(frame.f_code.co_filename)
    inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) and ".venv" not in path.parts else path
    return str(inside), frame.f_code.co_name
