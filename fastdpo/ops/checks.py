"""Checks of arguments. Every error reads `<op>: <argument> must <rule>; got <value>`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from .dtypes import FLOATS, INTS
from .results import STATISTICS


def require(
    condition: bool, op: str, argument: str, rule: str, got: object, *sizes: object, error: type[Exception] = ValueError
) -> None:
    """Raises `error` unless the condition holds.

    `sizes` fill the braces of `rule`. They are formatted only in case of an error: under
    `torch.compile`, formatting a size makes it a constant of the graph.
    """
    if not condition:
        raise error(f"{op}: {argument} must {rule.format(*sizes)}; got {got}")


def require_floating(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            rule = "be float16, bfloat16, float32 or float64"
            require(tensor.dtype in FLOATS, op, name, rule, tensor.dtype, error=TypeError)


def require_same_device(op: str, **tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    (first, device), *others = devices.items()
    for name, other in others:
        require(other == device, op, name, "be on the device of {} ({})", other, first, device)


def require_targets(op: str, targets: Tensor, shape: Sequence[int]) -> None:
    require(targets.dtype in INTS, op, "targets", "be int32 or int64", targets.dtype, error=TypeError)
    require(tuple(targets.shape) == tuple(shape), op, "targets", "have shape {}", list(targets.shape), list(shape))


def require_transform(op: str, softcap: float | None, temperature: float) -> None:
    require(softcap is None or softcap > 0, op, "softcap", "be positive or None", softcap)
    require(temperature > 0, op, "temperature", "be positive", temperature)


def requested_statistics(op: str, outputs: Sequence[str]) -> str:
    """The statistics among `outputs`, comma-separated in the order of `STATISTICS`.

    Custom ops take them in this form.
    """
    known = ("logps", *STATISTICS)
    names = outputs if isinstance(outputs, str) else tuple(outputs)
    valid = not isinstance(names, str) and all(name in known for name in names)
    require(valid, op, "outputs", f"be a sequence of names from {known}", names)
    return ",".join(name for name in STATISTICS if name in names)


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
