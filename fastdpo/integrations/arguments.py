"""Checks the options of `patch()`, which trainers and processes that are created later use."""

from __future__ import annotations

import os

from .. import checks, storage
from ..models.layouts import SharePrompts
from .protocol import PatchOptions


def checked_options(
    op: str,
    *,
    share_prompts: SharePrompts = True,
    memory_budget: int | None = None,
    reference_memory: bool | str | os.PathLike[str] = False,
    verify: bool = False,
    max_tokens: int | None = None,
    group_prompts: bool = False,
    log_savings: bool = False,
    longest_first: bool = False,
) -> PatchOptions:
    """The options of `patch()`.

    Args:
        op: the public function, for its error messages.
        share_prompts: see `PatchOptions`, like the others.
        memory_budget: any integer, also one of NumPy, or None.
        reference_memory: a bool, or the path or URL of a directory, which need not exist.
        verify, group_prompts, log_savings, longest_first: see `PatchOptions`.
        max_tokens: a positive integer, also one of NumPy, or None.

    Raises:
        TypeError, ValueError: an option has the wrong type or value.
    """
    checks.require_flags(
        op, verify=verify, group_prompts=group_prompts, log_savings=log_savings, longest_first=longest_first
    )
    if not isinstance(share_prompts, bool) and not (
        isinstance(share_prompts, str) and share_prompts == "deterministic"
    ):
        error = ValueError if isinstance(share_prompts, str) else TypeError
        raise error(f'{op}: share_prompts must be True, False or "deterministic"; got {checks.shown(share_prompts)}')
    checks.require_bytes(op, memory_budget=memory_budget)
    memory = reference_memory
    if not isinstance(memory, bool):
        rule = "be True, False or the path or URL of a directory"
        memory = str(storage.checked_directory(op, "reference_memory", memory, rule))
    checks.require_positive_integer(op, "max_tokens", max_tokens, optional=True)
    budget, tokens = (None if x is None else int(x) for x in (memory_budget, max_tokens))
    flags = group_prompts, log_savings, longest_first
    return PatchOptions(share_prompts, budget, memory, verify, tokens, *flags)
