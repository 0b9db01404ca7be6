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
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..ops.linear_logps import MEMORY_BUDGET
from . import fused_forward
from .fused_forward import Options

logger = logging.getLogger("fastdpo")


class Line(NamedTuple):
    """Versions of a trainer that were tested, and the module of this package that enters them."""

    trainer: str
    package: str
    versions: str
    module: str


LINES = (
    Line("trl.DPOTrainer", "trl", ">=1.15,<1.17", "trl_dpo"),
    Line("trl.DPOTrainer", "trl", ">=0.24,<0.29", "trl_dpo_legacy"),
    Line("trl.OnlineDPOTrainer", "trl", ">=1.15,<1.17", "trl_online_dpo"),
    Line("trl.OnlineDPOTrainer", "trl", ">=0.24,<0.29", "trl_online_dpo"),
    Line("openrlhf.DPOTrainer", "openrlhf", ">=0.9.10,<0.12", "openrlhf_dpo"),
)
PACKAGES = {line.trainer: line.package for line in LINES}


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


class _Patched(NamedTuple):
    """A trainer that is entered."""

    seam: Seam
    options: Options
    module: ModuleType


_patched: dict[str, _Patched] = {}


def patch(
    *targets: str,
    share_prompts: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    reference_memory: bool | str | os.PathLike = False,
) -> PatchReport:
    """Trainers built from now on train packed, with shared prompts and a fused head. Same numbers, less work.

    Calling it again changes nothing. What can't be entered is left exactly as it was, and the report says why.

    Args:
        *targets: names of trainers ("trl.DPOTrainer") or of their packages ("trl", "openrlhf"). Default: whatever is
            installed.
        share_prompts: compute the tokens that the two answers of a prompt have in common once.
        memory_budget: bytes of the head's gradient tiles to keep from forward to backward (`ops.linear_logps`).
        reference_memory: remember the reference's log-probabilities of each pair when they are first computed, so that
            later epochs and evaluations after the first don't run the reference. A directory: across processes too.
            Of both DPOTrainers. Off, with a logged reason, where the reference moves or anything in it is random, and
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
    names = _chosen(targets)
    found: list[tuple[Seam, ModuleType | None]] = []
    for name in names:
        entered = _patched.get(name)
        if entered is not None and entered.options != options:
            raise PatchError(f"patch: {name} is patched with {entered.options}; call fastdpo.unpatch() first")
        found.append(_examine(name) if entered is None else (entered.seam, entered.module))
    report = PatchReport(tuple(seam for seam, _ in found))
    if (targets or fused_forward.strict()) and not all(seam.on for seam in report.seams):
        raise PatchError(f"patch: {report}")

    for seam, module in found:
        if module is not None and seam.name not in _patched:
            module.enable(options)
            _patched[seam.name] = _Patched(seam, options, module)
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
    for name in names:
        _patched.pop(name).module.disable()
        fused_forward.uninstall_all(name)


def _chosen(targets: tuple[str, ...]) -> list[str]:
    """Names of trainers. All whose packages are installed if none is named; simply all if there is no such package."""
    unknown = [t for t in targets if t not in PACKAGES and t not in PACKAGES.values()]
    if unknown:
        known = ", ".join(PACKAGES)
        raise ValueError(f"patch: targets must be among {known} or their packages; got {', '.join(unknown)}")
    if targets:
        return [name for name, package in PACKAGES.items() if {name, package} & set(targets)]
    return [name for name, package in PACKAGES.items() if _version(package) is not None] or list(PACKAGES)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine(name: str) -> tuple[Seam, ModuleType | None]:
    """What is installed, and the module that enters it; None if nothing can be."""
    package = PACKAGES[name]
    version = _version(package)
    if version is None:
        return Seam(name, None, f"{package} is not installed"), None
    lines = [line for line in LINES if line.trainer == name]
    line = next((x for x in lines if SpecifierSet(x.versions).contains(Version(version), prereleases=True)), None)
    if line is None:
        install = " or ".join(f"'{package}{line.versions}'" for line in lines)
        return Seam(name, version, f"this version is not supported: install {install}"), None
    module = importlib.import_module(f".{line.module}", __package__)
    try:
        reason = module.why_not()
    except ImportError as error:
        reason = f"{package} can't be imported: {error}"
    if reason is not None:
        return Seam(name, version, reason), None
    stock = tuple(sorted(type(trainer).__name__ for trainer in module.living_trainers()))
    return Seam(name, version, None, stock), module
