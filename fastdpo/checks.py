"""Checks of arguments. Every error reads `<op>: <argument> must <rule>; got <value>`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
NUMBERS = (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)
SHOWN = (str, bytes, int, float, complex, list, tuple, set, dict, np.generic)
"""Types whose values are part of an error message, unless they are long."""


def require(
    condition: bool, op: str, argument: str, rule: str, got: object, *sizes: object, error: type[Exception] = ValueError
) -> None:
    """Raises `error` unless the condition holds.

    `sizes` fill the braces of `rule`. They are formatted only in case of an error: under
    `torch.compile`, formatting a size makes it a constant of the graph.
    """
    if not condition:
        raise error(f"{op}: {argument} must {rule.format(*sizes)}; got {got}")


def shown(value: object) -> str:
    """A value in an error message: itself if it is short, otherwise its type."""
    text = repr(value) if value is None or isinstance(value, SHOWN) else ""
    return text if 0 < len(text) <= 80 else f"a {type(value).__name__}"


def require_tensors(op: str, **tensors: object) -> None:
    """Requires dense tensors. Comes before anything else is read of them."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor; got {shown(tensor)}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{op}: {name} must be a dense tensor; got one with the layout {tensor.layout}")


def require_tensors_or_none(op: str, **tensors: object) -> None:
    require_tensors(op, **{name: tensor for name, tensor in tensors.items() if tensor is not None})


def require_values(op: str, **tensors: Tensor) -> None:
    """Requires tensors whose values the host can read."""
    for name, tensor in tensors.items():
        require(tensor.device.type != "meta", op, name, "hold values", "a tensor on the device meta")


def checked_path(op: str, argument: str, value: object, rule: str) -> Path:
    """The path that a string or an `os.PathLike` names."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"{op}: {argument} must {rule}; got {shown(value)}")
    require(bool(path.strip()) and "\0" not in path, op, argument, rule, repr(path))
    return Path(path)


def require_flags(op: str, **flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{op}: {name} must be True or False; got {shown(flag)}")


def require_number(op: str, argument: str, value: object, rule: str) -> None:
    """Requires a number, of Python or NumPy, that is not a bool."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{op}: {argument} must {rule}; got {shown(value)}")


def require_positive(op: str, argument: str, value: object, *, optional: bool = False) -> None:
    """Requires a positive and finite number, or None if it is optional."""
    if optional and value is None:
        return
    rule = f"be positive and finite{' or None' if optional else ''}"
    require_number(op, argument, value, rule)
    require(0 < value < math.inf, op, argument, rule, value)  # pyright: ignore[reportOperatorIssue]


def require_finite(op: str, argument: str, value: object, *, optional: bool = False) -> None:
    """Requires a finite number, or None if it is optional."""
    if optional and value is None:
        return
    rule = f"be finite{' or None' if optional else ''}"
    require_number(op, argument, value, rule)
    require(-math.inf < value < math.inf, op, argument, rule, value)  # pyright: ignore[reportOperatorIssue]


def require_integer(op: str, argument: str, value: object, rule: str) -> None:
    """Requires an integer, of Python or NumPy, that is not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer | torch.SymInt):
        raise TypeError(f"{op}: {argument} must {rule}; got {shown(value)}")


def require_positive_integer(op: str, argument: str, value: object, *, optional: bool = False) -> None:
    """Requires a positive integer, or None if it is optional."""
    if optional and value is None:
        return
    rule = f"be a positive integer{' or None' if optional else ''}"
    require_integer(op, argument, value, rule)
    require(value > 0, op, argument, rule, value)  # pyright: ignore[reportOperatorIssue]


def require_bytes(op: str, **numbers: object) -> None:
    rule = "be a number of bytes, an int of 0 or more, or None"
    for name, n in numbers.items():
        if n is not None:
            require_integer(op, name, n, rule)
            require(n >= 0, op, name, rule, n)  # pyright: ignore[reportOperatorIssue]


def require_real(op: str, **tensors: Tensor | None) -> None:
    """Requires that no tensor is complex."""
    for name, tensor in tensors.items():
        if tensor is not None:
            is_real = not tensor.dtype.is_complex
            require(is_real, op, name, "be bool, int or floating point", tensor.dtype, error=TypeError)


def require_floating(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            rule = "be float16, bfloat16, float32 or float64"
            require(tensor.dtype in FLOATS, op, name, rule, tensor.dtype, error=TypeError)


def require_ints(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        require(tensor.dtype in INTS, op, name, "be int32 or int64", tensor.dtype, error=TypeError)


def require_same_device(op: str, **tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    (first, device), *others = devices.items()
    for name, other in others:
        require(other == device, op, name, "be on the device of {} ({})", other, first, device)


def require_targets(op: str, targets: Tensor, shape: Sequence[int]) -> None:
    require_ints(op, targets=targets)
    require(tuple(targets.shape) == tuple(shape), op, "targets", "have shape {}", list(targets.shape), list(shape))


def require_transform(op: str, softcap: float | None, logit_scale: float, temperature: float) -> None:
    require_positive(op, "softcap", softcap, optional=True)
    require_finite(op, "logit_scale", logit_scale)
    require_positive(op, "temperature", temperature)


def require_distinct_memory(op: str, argument: str, rows: Tensor, option: str) -> None:
    """Requires that no two elements of `rows` [N, V] share memory, so that they can be overwritten."""
    (n, v), (row_stride, column_stride) = rows.shape, rows.stride()
    expanded = (n > 1 and row_stride <= 0) or (v > 1 and column_stride <= 0)
    overlapping = n > 1 and v > 1 and row_stride <= (v - 1) * column_stride and column_stride <= (n - 1) * row_stride
    distinct = n == 0 or not (expanded or overlapping)
    require(
        distinct, op, argument, "not have elements that overlap in memory with {}", f"strides {rows.stride()}", option
    )


def require_no_dtensor(op: str, **tensors: Tensor | None) -> None:
    """Requires plain tensors.

    Kernels read the local memory, which holds only a shard of a DTensor.
    """
    for name, tensor in tensors.items():
        sharded = isinstance(tensor, DTensor)
        require(not sharded, op, name, "be a whole tensor, not a DTensor (FSDP2: pass full_tensor())", type(tensor))
