"""Checks the options of `patch()`, which trainers and processes that are created later use."""

from __future__ import annotations

import operator
import os
from pathlib import Path

from ..ops.linear_logps import MEMORY_BUDGET
from .protocol import PatchOptions


def checked_options(
    op: str,
    *,
    share_prompts: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    reference_memory: bool | str | os.PathLike[str] = False,
) -> PatchOptions:
    """The options of `patch()`.

    Args:
        op: the public function, for its error messages.
        share_prompts: see `PatchOptions`, like the others.
        memory_budget: any integer, also one of NumPy.
        reference_memory: a bool, or the path of a directory, which need not exist.

    Raises:
        TypeError, ValueError: an option has the wrong type or value.
    """
    if not isinstance(share_prompts, bool):
        raise TypeError(f"{op}: share_prompts must be True or False; got {share_prompts!r}")
    return PatchOptions(share_prompts, _bytes(op, memory_budget), _directory(op, reference_memory))


def _bytes(op: str, memory_budget: object) -> int:
    rule = f"{op}: memory_budget must be a number of bytes, an int of at least 0; got {memory_budget!r}"
    if isinstance(memory_budget, bool):
        raise TypeError(rule)
    try:
        n_bytes = operator.index(memory_budget)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise TypeError(rule) from None
    if n_bytes < 0:
        raise ValueError(rule)
    return n_bytes


def _directory(op: str, reference_memory: object) -> bool | Path:
    rule = f"{op}: reference_memory must be True, False or the path of a directory; got {reference_memory!r}"
    if isinstance(reference_memory, bool):
        return reference_memory
    path = os.fspath(reference_memory) if isinstance(reference_memory, os.PathLike) else reference_memory
    if not isinstance(path, str):
        raise TypeError(rule)
    if not path.strip() or "\0" in path:
        raise ValueError(rule)
    return Path(path)
