"""Checks of arguments. Every error reads `<op>: <argument> must <rule>; got <value>`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .plain_checks import checked_path as checked_path
from .plain_checks import require as require
from .plain_checks import require_bytes as require_bytes
from .plain_checks import require_flags as require_flags
from .plain_checks import require_integer as require_integer
from .plain_checks import require_positive_integer as require_positive_integer
from .plain_checks import shown as shown

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
NUMBERS = (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)

LARGEST_FLOAT = sys.float_info.max

T = TypeVar("T")


def require_tensors(op: str, **tensors: object) -> None:
    """Requires dense tensors. Comes before anything else is read of them."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor; got {shown(tensor)}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{op}: {name} must be a dense tensor; got one with the layout {tensor.layout}")
        if tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized"
            raise TypeError(f"{op}: {name} must be a dense tensor; got a {kind} one")


def require_tensors_or_none(op: str, **tensors: object) -> None:
    require_tensors(op, **{name: tensor for name, tensor in tensors.items() if tensor is not None})


def require_values(op: str, **tensors: Tensor) -> None:
    """Requires tensors whose values the host can read."""
    for name, tensor in tensors.items():
        require(tensor.device.type != "meta", op, name, "hold values", "a tensor on the device meta")


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
    require(value > 0 and _is_finite(value), op, argument, rule, value)  # pyright: ignore[reportOperatorIssue]


def require_finite(op: str, argument: str, value: object, *, optional: bool = False) -> None:
    """Requires a finite number, or None if it is optional."""
    if optional and value is None:
        return
    rule = f"be finite{' or None' if optional else ''}"
    require_number(op, argument, value, rule)
    require(_is_finite(value), op, argument, rule, value)


def _is_finite(number: Any) -> bool:
    """Whether a number is finite as a float, too."""
    is_float = not isinstance(number, int) or -LARGEST_FLOAT <= number <= LARGEST_FLOAT
    return is_float and -math.inf < number < math.inf


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


def agreed(first: T, *others: T) -> T:
    """What several others agree on, otherwise the first. An error then names the argument that differs."""
    return others[0] if len(others) > 1 and all(x == others[0] for x in others) else first


def require_same_device(op: str, **tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    device = agreed(*devices.values())
    on_it = [name for name, other in devices.items() if other == device]
    for name, other in devices.items():
        require(other == device, op, name, "be on the device of {} ({})", other, on_it[0], device)


def require_targets(op: str, targets: Tensor, shape: Sequence[int]) -> None:
    require_ints(op, targets=targets)
    require(tuple(targets.shape) == tuple(shape), op, "targets", "have shape {}", list(targets.shape), list(shape))


def require_transform(op: str, softcap: float | None, logit_scale: float, temperature: float) -> None:
    require_positive(op, "softcap", softcap, optional=True)
    require_finite(op, "logit_scale", logit_scale)
    require_positive(op, "temperature", temperature)


def require_distinct_memory(op: str, argument: str, rows: Tensor, purpose: str) -> None:
    """Requires that no two elements of `rows` [N, V] share memory, so that they can be overwritten for a purpose."""
    (n, v), (row_stride, column_stride) = rows.shape, rows.stride()
    expanded = (n > 1 and row_stride <= 0) or (v > 1 and column_stride <= 0)
    overlapping = n > 1 and v > 1 and row_stride <= (v - 1) * column_stride and column_stride <= (n - 1) * row_stride
    distinct = n == 0 or not (expanded or overlapping)
    rule = "not have elements that overlap in memory, since {}"
    require(distinct, op, argument, rule, f"strides {rows.stride()}", purpose)


def require_no_dtensor(op: str, **tensors: Tensor | None) -> None:
    """Requires plain tensors.

    Kernels read the local memory, which holds only a shard of a DTensor.
    """
    for name, tensor in tensors.items():
        sharded = isinstance(tensor, DTensor)
        require(not sharded, op, name, "be a whole tensor, not a DTensor (FSDP2: pass full_tensor())", type(tensor))
