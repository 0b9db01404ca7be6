"""`patch()` and its undoing: which trainers are entered, and a report of what is on, what is off and why."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from packaging.version import Version

from ..ops.linear_logps import MEMORY_BUDGET
from . import fused_forward
from .fused_forward import Options

logger = logging.getLogger("fastdpo")

INTEGRATIONS = ("trl_dpo", "trl_online_dpo")
"""Modules of this package, one a trainer. Each names itself, its package, and the versions that it was tested with."""


class PatchError(RuntimeError):
    """A trainer that was asked for by name can't be patched, or is patched with other options already."""


@dataclass(frozen=True)
class Seam:
    """One trainer, and whether it is entered.

    Attributes:
        name: such as "trl.DPOTrainer".
        version: of the package that was found, or None.
        reason: why it is off; None if it is on.
        stock_trainers: class names of trainers that were built before; they stay as they were.
    """

    name: str
    version: str | None
    reason: str | None
    stock_trainers: tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        text = (
            f"{self.name}{f' ({self.version})' if self.version else ''}: {'on' if self.on else f'off, {self.reason}'}"
        )
        if self.stock_trainers:
            text += f"; built before and left as they were: {', '.join(self.stock_trainers)}"
        return text


@dataclass(frozen=True)
class PatchReport:
    """What `patch()` did."""

    seams: tuple[Seam, ...]

    def __str__(self) -> str:
        return "fastdpo: " + " | ".join(map(str, self.seams))


_patched: dict[str, tuple[Seam, Options]] = {}


def patch(
    *targets: str,
    share_prompts: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    reference_memory: bool | str | os.PathLike = False,
) -> PatchReport:
    """Trainers built from now on train packed, with shared prompts and a fused head. Same numbers, less work.

    Calling it again changes nothing. What can't be entered is left exactly as it was, and the report says why.

    Args:
        *targets: names of trainers ("trl.DPOTrainer") or of their packages ("trl"). Default: whatever is installed.
        share_prompts: compute the tokens that the two answers of a prompt have in common once.
        memory_budget: bytes of the head's gradient tiles to keep from forward to backward (`ops.linear_logps`).
        reference_memory: remember the reference's log-probabilities of each pair when they are first computed, so that
            later epochs and evaluations after the first don't run the reference. A directory: across processes too.
            Of "trl.DPOTrainer". Off, with a logged reason, where the reference moves or anything in it is random, and
            where ranks compute it together.

    Returns:
        The report; also logged, as one line, by the logger "fastdpo" at INFO.

    Raises:
        ValueError: a target is not known.
        PatchError: a target that was named can't be entered, or was entered with other options; with
            `FASTDPO_STRICT=1`, anything is off. Nothing is changed then.
    """
    kept = reference_memory if isinstance(reference_memory, bool) else Path(reference_memory)
    options = Options(share_prompts, memory_budget, kept)
    modules = _integrations()
    unknown = [t for t in targets if not any(t in (m.NAME, m.PACKAGE) for m in modules)]
    if unknown:
        known = ", ".join(m.NAME for m in modules)
        raise ValueError(f"patch: targets must be among {known} or their packages; got {', '.join(unknown)}")
    chosen = [m for m in modules if not targets or m.NAME in targets or m.PACKAGE in targets]

    seams = []
    for module in chosen:
        seam, old_options = _patched.get(module.NAME, (None, options))
        if old_options != options:
            raise PatchError(f"patch: {module.NAME} is patched with {old_options}; call fastdpo.unpatch() first")
        seams.append(seam or _examine(module))
    report = PatchReport(tuple(seams))
    if (targets or fused_forward.strict()) and not all(seam.on for seam in seams):
        raise PatchError(f"patch: {report}")

    for module, seam in zip(chosen, seams, strict=True):
        if seam.on and module.NAME not in _patched:
            module.enable(options)
            _patched[module.NAME] = (seam, options)
    logger.info("%s", report)
    return report


def unpatch() -> None:
    """Gives every trainer class and every living model back what it had before `patch()`."""
    _undo(set(_patched))


@contextmanager
def patched(
    *targets: str,
    share_prompts: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    reference_memory: bool | str | os.PathLike = False,
) -> Iterator[PatchReport]:
    """`with fastdpo.patched():` patches for the block. Takes the arguments of `patch`; a patch from outside stays."""
    before = set(_patched)
    report = patch(
        *targets, share_prompts=share_prompts, memory_budget=memory_budget, reference_memory=reference_memory
    )
    try:
        yield report
    finally:
        _undo(set(_patched) - before)


def _undo(names: set[str]) -> None:
    for module in _integrations():
        if module.NAME in names:
            del _patched[module.NAME]
            module.disable()
            fused_forward.uninstall_all(module.NAME)


def _integrations() -> list[ModuleType]:
    return [importlib.import_module(f".{name}", __package__) for name in INTEGRATIONS]


def _examine(module: ModuleType) -> Seam:
    try:
        version = importlib.metadata.version(module.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return Seam(module.NAME, None, f"{module.PACKAGE} is not installed")
    if not module.SUPPORTED.contains(Version(version), prereleases=True):
        return Seam(module.NAME, version, f"supported versions of {module.PACKAGE}: {module.SUPPORTED}")
    try:
        reason = module.why_not()
    except ImportError as error:
        reason = f"{module.PACKAGE} can't be imported: {error}"
    stock = () if reason else tuple(sorted(type(trainer).__name__ for trainer in module.living_trainers()))
    return Seam(module.NAME, version, reason, stock)
