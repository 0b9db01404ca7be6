"""Checks of arguments. Every error reads `<op>: <argument> must <rule>; got <value>`.

torch is imported where a check needs it, so that the command line makes its checks at once.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = (str, bytes, int, float, complex, list, tuple, set, dict)
"""Types whose values are part of an error message, unless they are long. Scalars of NumPy are, too."""

LARGEST_INT = 2**63 - 1
LARGEST_FLOAT = sys.float_info.max

T = TypeVar("T")


def require(
    condition: bool, op: str, argument: str, rule: str, got: object, *sizes: object, error: type[Exception] = ValueError
) -> None:
    """Raises `error` unless the condition holds.

    `sizes` fill the braces of `rule`. They are formatted only in case of an error: under
    `torch.compile`, formatting a size makes it a constant of the graph.
    """
    if not condition:
        got = shown(got) if isinstance(got, int) else got
        raise error(f"{op}: {argument} must {rule.format(*sizes)}; got {got}")


def shown(value: object) -> str:
    """A value in an error message: itself if it is short, otherwise its type."""
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value) if value is None or isinstance(value, SHOWN) or _is("numpy", ["generic"], value) else ""
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = ""
    return text if 0 < len(text) <= 80 else f"a {type(value).__name__}"


def suggested(name: str, names: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the known name that is most similar to it, if any is."""
    names = {known.lower(): known for known in names}
    similar = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {names[similar[0]]}?" if similar else ""


def require_flags(op: str, **flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{op}: {name} must be True or False; got {shown(flag)}")


def require_integer(op: str, argument: str, value: object, rule: str) -> None:
    """Requires an integer of up to 64 bits, of Python or NumPy, that is not a bool."""
    if isinstance(value, bool) or not (isinstance(value, Integral) or _is("torch", ["SymInt"], value)):
        raise TypeError(f"{op}: {argument} must {rule}; got {shown(value)}")
    if isinstance(value, Integral):
        require(-LARGEST_INT - 1 <= int(value) <= LARGEST_INT, op, argument, "fit into 64 bits", value)


def _require_scalar(
    kind: Callable, op: str, argument: str, value: object, rule: str, holds: Callable, optional: bool
) -> None:
    """Requires a value that `kind` takes, `require_integer` or `require_number`, and for which something holds, or None
    if it is optional.
    """
    if optional and value is None:
        return
    rule += " or None" if optional else ""
    kind(op, argument, value, rule)
    require(holds(value), op, argument, rule, value)


def require_positive_integer(op: str, argument: str, value: object, *, optional: bool = False) -> None:
    """Requires a positive integer, or None if it is optional."""
    _require_scalar(require_integer, op, argument, value, "be a positive integer", lambda n: n > 0, optional)


def require_bytes_or_none(op: str, argument: str, value: object) -> None:
    rule = "be a number of bytes, an int of 0 or more,"
    _require_scalar(require_integer, op, argument, value, rule, lambda n: n >= 0, optional=True)


def require_tensors(op: str, **tensors: object) -> None:
    """Requires dense tensors. Comes before anything else is read of them."""
    import torch

    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
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
    is_number = isinstance(value, int | float) or _is("numpy", ["integer", "floating"], value)
    if isinstance(value, bool) or not (is_number or _is("torch", ["SymInt", "SymFloat"], value)):
        raise TypeError(f"{op}: {argument} must {rule}; got {shown(value)}")


def require_positive(op: str, argument: str, value: object, *, optional: bool = False) -> None:
    """Requires a positive and finite number, or None if it is optional."""
    rule = "be positive and finite"
    _require_scalar(require_number, op, argument, value, rule, lambda x: x > 0 and _is_finite(x), optional)


def require_finite(op: str, argument: str, value: object, *, optional: bool = False) -> None:
    """Requires a finite number, or None if it is optional."""
    _require_scalar(require_number, op, argument, value, "be finite", _is_finite, optional)


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
    import torch

    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for name, tensor in tensors.items():
        if tensor is not None:
            rule = "be float16, bfloat16, float32 or float64"
            require(tensor.dtype in floats, op, name, rule, tensor.dtype, error=TypeError)


def require_ints(op: str, **tensors: Tensor) -> None:
    import torch

    for name, tensor in tensors.items():
        is_int = tensor.dtype in (torch.int32, torch.int64)
        require(is_int, op, name, "be int32 or int64", tensor.dtype, error=TypeError)


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


def require_shape(op: str, argument: str, tensor: Tensor, shape: Sequence[int]) -> None:
    require(tuple(tensor.shape) == tuple(shape), op, argument, "be {}", list(tensor.shape), list(shape))


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
    from torch.distributed.tensor import DTensor

    for name, tensor in tensors.items():
        sharded = isinstance(tensor, DTensor)
        require(not sharded, op, name, "be a whole tensor, not a DTensor (FSDP2: pass full_tensor())", type(tensor))


def _is(package: str, names: Sequence[str], value: object) -> bool:
    """Whether a value has one of the types of a package, which is imported then."""
    module = sys.modules.get(package)
    return module is not None and isinstance(value, tuple(getattr(module, name) for name in names))
