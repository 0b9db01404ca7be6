"""Checks the options of `patch()`, which trainers and processes that are created later use."""

from __future__ import annotations

import os

from .. import checks
from ..ops.linear_logps import MEMORY_BUDGET
from .protocol import PatchOptions


def checked_options(
    op: str,
    *,
    share_prompts: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    reference_memory: bool | str | os.PathLike[str] = False,
    verify: bool = False,
) -> PatchOptions:
    """The options of `patch()`.

    Args:
        op: the public function, for its error messages.
        share_prompts: see `PatchOptions`, like the others.
        memory_budget: any integer, also one of NumPy.
        reference_memory: a bool, or the path of a directory, which need not exist.
        verify: see `PatchOptions`.

    Raises:
        TypeError, ValueError: an option has the wrong type or value.
    """
    checks.require_flags(op, share_prompts=share_prompts, verify=verify)
    checks.require_bytes(op, memory_budget=memory_budget)
    memory = reference_memory
    if not isinstance(memory, bool):
        rule = "be True, False or the path of a directory"
        memory = checks.checked_path(op, "reference_memory", memory, rule)
    return PatchOptions(share_prompts, int(memory_budget), memory, verify)
