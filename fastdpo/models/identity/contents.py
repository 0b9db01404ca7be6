"""What a module keeps next to its parameters and buffers: its attributes, and what lists, dictionaries, sets and
objects among these hold.

A forward may read all of it, and may write it. `structure` compares it between calls, and `examine.snapshot` around the
runs of a probe.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import harmless
from .functions import PLAIN

INTERNAL = frozenset({*vars(nn.Module()), *vars(nn.ParameterDict()), "forward"})
"""Names of the attributes that each module, and each dictionary of parameters, has by itself, and that of a forward,
which transformers 4 sets on modules whose outputs it records.
"""

Container = dict | list | set | deque

DEPTH = 3
"""Up to this depth, containers in the attributes of a module are looked into."""

_FOREIGN = (*harmless.CODE, "builtins", "functools", "collections", "numpy", "datasets", "tokenizers")
"""Packages whose objects are not looked into."""


def is_own(name: str) -> bool:
    """Whether an attribute of a module was set by its class, or by user code."""
    return name not in INTERNAL and not name.startswith(harmless.COUNTERS)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that its results may depend on."""
    return {name: x for name, x in vars(module).items() if is_own(name) and name not in harmless.ATTRIBUTES}


def containers_in(values: Iterable[Any], depth: int = DEPTH) -> Iterator[Container]:
    """The containers among values and in these, the outer ones first. An object stands for its attributes. One may
    occur more than once.
    """
    for x in values:
        if type(x) in PLAIN or isinstance(x, Tensor | nn.Module):
            continue
        inside = x if isinstance(x, Container) else vars(x) if _is_record(x) else None
        if inside is not None:
            yield inside
        if depth and (inside is not None or isinstance(x, tuple)):
            yield from containers_in(members_of(x if inside is None else inside), depth - 1)


def members_of(container: Iterable[Any]) -> Iterable[Any]:
    return [*container.values()] if isinstance(container, dict) else [*container]


def copy_of(container: Container) -> Container:
    """A copy that holds the same members."""
    kind = next(kind for kind in (dict, list, set, deque) if isinstance(container, kind))
    return kind(container)


def plain_members(x: Any, depth: int = DEPTH) -> Any:
    """The plain values in a value, in a form that can be hashed. Others are left out, and so is what configurations
    hold, to which many modules refer.
    """
    if type(x) in PLAIN:
        return type(x), x
    if isinstance(x, Container | tuple) and depth:
        if isinstance(x, dict):
            return dict, tuple((k, plain_members(y, depth - 1)) for k, y in x.items() if type(k) in PLAIN)
        members = [plain_members(y, depth - 1) for y in x]
        return type(x).__name__, frozenset(members) if isinstance(x, set) else tuple(members)
    if depth and _is_record(x) and not is_configuration(type(x)):
        return plain_members(vars(x), depth)
    return None


@functools.cache
def is_configuration(kind: type) -> bool:
    """Whether a class is that of the configuration of a model of transformers."""
    return any(base.__module__ == "transformers.configuration_utils" for base in kind.__mro__)


def configuration_entries(config: Any) -> tuple:
    """The entries of a configuration that the results of a model may depend on, in a form that can be hashed."""
    return tuple(
        (name, plain_members(x))
        for name, x in vars(config).items()
        if name not in harmless.CONFIG_ENTRIES and not name.startswith("_")
    )


def is_rotary(module: nn.Module) -> bool:
    """Whether a module keeps rotary embeddings, which follow the width of the batches that it was called with."""
    return hasattr(module, "rope_type") or "max_seq_len_cached" in vars(module)


def digest_of(x: Tensor | None) -> int | None:
    """A number for the values of a tensor. None for a tensor whose memory cannot be read."""
    if x is None or type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.device.type == "meta":
        return None
    return hash(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _is_record(x: Any) -> bool:
    """Whether an object is the state of a module, or its configuration. One that holds modules is none: it is what
    trains them.
    """
    if not hasattr(x, "__dict__") or isinstance(x, type | Tensor | nn.Module):
        return False
    is_known = harmless.is_of(type(x).__module__, _FOREIGN) and not is_configuration(type(x))
    return not is_known and not any(isinstance(y, nn.Module) for y in vars(x).values())
