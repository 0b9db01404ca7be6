"""Errors of the callers, worded alike: `<op>: <argument> must <rule>; got <value>`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .results import STATISTICS

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)


def require(
    condition: bool, op: str, argument: str, rule: str, got: object, *sizes: object, error: type[Exception] = ValueError
) -> None:
    """`sizes` fill the braces of a broken rule. Not sooner: under torch.compile a formatted size is a constant."""
    if not condition:
        raise error(f"{op}: {argument} must {rule.format(*sizes)}; got {got}")


def require_floating(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            rule = "be float16, bfloat16, float32 or float64"
            require(tensor.dtype in FLOATS, op, name, rule, tensor.dtype, error=TypeError)


def require_same_device(op: str, **tensors: Tensor | None) -> None:
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    (first, device), *others = given.items()
    for name, other in others:
        require(other == device, op, name, "be on the device of {} ({})", other, first, device)


def require_targets(op: str, targets: Tensor, shape: Sequence[int]) -> None:
    require(targets.dtype in INTS, op, "targets", "be int32 or int64", targets.dtype, error=TypeError)
    require(tuple(targets.shape) == tuple(shape), op, "targets", "have shape {}", list(targets.shape), list(shape))


def require_transform(op: str, softcap: float | None, temperature: float) -> None:
    require(softcap is None or softcap > 0, op, "softcap", "be positive or None", softcap)
    require(temperature > 0, op, "temperature", "be positive", temperature)


def requested(op: str, outputs: Sequence[str]) -> str:
    """The statistics among `outputs`, comma-separated in canonical order: the form that the custom ops take."""
    known = ("logps", *STATISTICS)
    names = outputs if isinstance(outputs, str) else tuple(outputs)
    right = not isinstance(names, str) and all(name in known for name in names)
    require(right, op, "outputs", f"be a sequence of names from {known}", names)
    return ",".join(name for name in STATISTICS if name in names)


def require_own_places(op: str, argument: str, rows: Tensor, option: str) -> None:
    """No two elements of [N, V] at one place: what is written over one would be written over the other."""
    (n, v), (of_rows, of_columns) = rows.shape, rows.stride()
    spread = (n <= 1 or of_rows > 0) and (v <= 1 or of_columns > 0)
    crossed = n > 1 and v > 1 and of_rows <= (v - 1) * of_columns and of_columns <= (n - 1) * of_rows
    apart = n == 0 or (spread and not crossed)
    require(apart, op, argument, "have one place for each element with {}", f"strides {rows.stride()}", option)


def require_whole(op: str, **tensors: Tensor | None) -> None:
    """No DTensor: kernels read memory, and a shard's memory is not the tensor."""
    for name, tensor in tensors.items():
        sharded = isinstance(tensor, DTensor)
        require(not sharded, op, name, "be a whole tensor, not a DTensor (FSDP2: pass full_tensor())", type(tensor))
