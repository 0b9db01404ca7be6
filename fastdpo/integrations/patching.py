"""`patch()` and `unpatch()`, and the report of which trainers are patched, and why others are not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..models import fallback, forward
from ..models.fallback import logger
from ..ops.linear_logps import MEMORY_BUDGET
from .protocol import PatchOptions, TrainerLine
from .replacements import existing_instances
from .versions import unsupported_version_reason


class Line(NamedTuple):
    """One trainer in a range of versions.

    Attributes:
        trainer: name of the trainer, which begins with the name of the package that is imported.
        versions: versions of its distribution that are supported.
        module: the module of `fastdpo.integrations` that patches the trainer, a `TrainerLine`.
        trainer_modules: modules that may define the trainer's class.
        by_default: whether `patch()` without targets patches the trainer.
    """

    trainer: str
    versions: str
    module: str
    trainer_modules: tuple[str, ...]
    by_default: bool = True

    @property
    def package(self) -> str:
        return self.trainer.partition(".")[0]


DPO_MODULES = ("trl.trainer.dpo_trainer",)
ONLINE_DPO_MODULES = ("trl.experimental.online_dpo.online_dpo_trainer", "trl.trainer.online_dpo_trainer")

LINES = (
    Line("trl.DPOTrainer", ">=1.15,<1.17", "trl.dpo", DPO_MODULES),
    Line("trl.DPOTrainer", ">=0.29,<1.15", "trl.dpo_logits", DPO_MODULES),
    Line("trl.DPOTrainer", ">=0.24,<0.29", "trl.dpo_legacy", DPO_MODULES),
    Line("trl.OnlineDPOTrainer", ">=1.15,<1.17", "trl.online_dpo", ONLINE_DPO_MODULES),
    Line("trl.OnlineDPOTrainer", ">=0.29,<1.15", "trl.online_dpo", ONLINE_DPO_MODULES),
    Line("trl.OnlineDPOTrainer", ">=0.24,<0.29", "trl.online_dpo", ONLINE_DPO_MODULES),
    Line("trl.KTOTrainer", ">=1.15,<1.17", "trl.kto", ("trl.trainer.kto_trainer",)),
    Line("trl.SFTTrainer", ">=1.15,<1.17", "trl.sft", ("trl.trainer.sft_trainer",), by_default=False),
    Line("trl.GRPOTrainer", ">=1.15,<1.17", "trl.grpo", ("trl.trainer.grpo_trainer",), by_default=False),
    Line("trl.RLOOTrainer", ">=1.15,<1.17", "trl.rloo", ("trl.trainer.rloo_trainer",), by_default=False),
    Line("trl.CPOTrainer", ">=1.15,<1.17", "trl.cpo", ("trl.experimental.cpo.cpo_trainer",), by_default=False),
    Line("trl.ORPOTrainer", ">=1.15,<1.17", "trl.orpo", ("trl.experimental.orpo.orpo_trainer",), by_default=False),
    Line("openrlhf.DPOTrainer", ">=0.9.10,<0.12", "openrlhf.dpo", ("openrlhf.trainer.dpo_trainer",)),
    Line("swift.DPOTrainer", ">=4.6,<4.7", "swift.dpo", ("swift.rlhf_trainers.dpo_trainer",)),
    Line("swift.CPOTrainer", ">=4.6,<4.7", "swift.cpo", ("swift.rlhf_trainers.cpo_trainer",)),
    Line("swift.ORPOTrainer", ">=4.6,<4.7", "swift.orpo", ("swift.rlhf_trainers.orpo_trainer",)),
    Line("swift.KTOTrainer", ">=4.6,<4.7", "swift.kto", ("swift.rlhf_trainers.kto_trainer",)),
    Line("llamafactory.DPOTrainer", "==0.9.5", "llamafactory.dpo", ("llamafactory.train.dpo.trainer",)),
    Line("llamafactory.KTOTrainer", "==0.9.5", "llamafactory.kto", ("llamafactory.train.kto.trainer",)),
)
"""Those of one trainer from the newest versions to the oldest."""

DISTRIBUTIONS = {"swift": "ms-swift"}
"""The distributions of packages, where the names differ."""

CHANGING_OTHERS = ("swift",)
"""Packages whose import changes other packages: ms-swift deletes `__init__` of TRL's trainers. Their
trainers are patched once the program has imported them, or by name.
"""

REMEMBERING = ("trl.DPOTrainer", "openrlhf.DPOTrainer")
"""The trainers that the option `reference_memory` applies to."""

TRAINERS = tuple(dict.fromkeys(line.trainer for line in LINES))
PACKAGES = tuple(dict.fromkeys(line.package for line in LINES))


class PatchError(RuntimeError):
    """A trainer that was named cannot be patched, or is already patched with other options."""


@dataclass(frozen=True)
class Seam:
    """One trainer, and whether it is patched.

    Attributes:
        name: such as "trl.DPOTrainer".
        version: version of the package that is installed, or None.
        reason: why the trainer is not patched; None if it is.
        stock_trainers: class names of trainers created before `patch()`, which stay unpatched.
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
            text += f"; created before patch() and not patched: {', '.join(self.stock_trainers)}"
        return text


@dataclass(frozen=True)
class PatchReport:
    """The result of `patch()`."""

    seams: tuple[Seam, ...]

    def __str__(self) -> str:
        return "fastdpo: " + " | ".join(map(str, self.seams))


class _Patched(NamedTuple):
    """A trainer that is patched."""

    seam: Seam
    options: PatchOptions
    line: TrainerLine


_patched: dict[str, _Patched] = {}


def patch(
    *targets: str,
    share_prompts: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    reference_memory: bool | str | os.PathLike = False,
) -> PatchReport:
    """Patches trainers. Those created afterwards train packed, with shared prompts and a fused
    head.

    Numbers stay the same up to rounding. Calling `patch` again with the same options changes
    nothing. A trainer that cannot be patched is left exactly as it was, and the report says why.

    Args:
        *targets: names of trainers ("trl.DPOTrainer"), or of packages ("trl"): all trainers of the
            package that are supported in the installed version. Default: the preference trainers of
            all packages that are installed.
        share_prompts: compute the tokens that the two answers to a prompt begin with once.
        memory_budget: bytes of the head's gradient tiles to keep from forward to backward
            (`ops.linear_logps`).
        reference_memory: remember the reference's log-probabilities of each pair when they are
            first computed, so that later epochs, and evaluations after the first, do not run the
            reference. With a directory, later processes remember them, too. Applies to the
            DPOTrainers of TRL and OpenRLHF. Disabled, with a logged reason, where the reference is
            trained or random, and where ranks run it together.

    Returns:
        The report. The logger "fastdpo" logs it, too, as one line at level INFO.

    Raises:
        ValueError: a target is unknown.
        PatchError: a named target cannot be patched, or is already patched with other options. With
            `FASTDPO_STRICT=1`, any trainer cannot be patched. Nothing is changed then.
    """
    memory = reference_memory if isinstance(reference_memory, bool) else Path(reference_memory)
    options = PatchOptions(share_prompts, memory_budget, memory)
    names = targeted_trainers("patch", targets)
    examined: dict[str, tuple[Seam, TrainerLine | None]] = {}
    # TRL last: with transformers 5, TRL 0.24 can be imported only after LLaMA-Factory.
    for name in sorted(names, key=lambda name: name.startswith("trl.")):
        before = _patched.get(name)
        if before is not None and before.options != options:
            raise PatchError(f"patch: {name} is patched with {before.options}; call fastdpo.unpatch() first")
        examined[name] = _examine(name, bool(targets)) if before is None else (before.seam, before.line)
    report = PatchReport(tuple(examined[name][0] for name in names))
    if (targets or fallback.strict()) and not all(seam.on for seam in report.seams):
        raise PatchError(f"patch: {report}")

    for seam, line in map(examined.__getitem__, names):
        if line is not None and seam.name not in _patched:
            line.enable(options)
            _patched[seam.name] = _Patched(seam, options, line)
    logger.info("%s", report)
    forgetting = [seam.name for seam in report.seams if seam.on and seam.name not in REMEMBERING]
    if memory and forgetting:
        logger.info("reference_memory does not apply to %s", ", ".join(forgetting))
    return report


def unpatch() -> None:
    """Undoes `patch()`, for trainer classes and for existing trainers and models."""
    _undo(set(_patched))


@contextmanager
def patched(
    *targets: str,
    share_prompts: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    reference_memory: bool | str | os.PathLike = False,
) -> Iterator[PatchReport]:
    """Patches trainers during a `with` block. Takes the arguments of
    `patch`, and keeps earlier patches.
    """
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
        _patched.pop(name).line.disable()
        forward.uninstall_all(name)


def targeted_trainers(op: str, targets: Sequence[str]) -> list[str]:
    """The names of the trainers that are targeted, by their own names or those of their packages.

    A package stands for its trainers that have a line for the installed version. If there are none,
    it stands for all of its trainers, and each has a reason why it cannot be patched.

    Args:
        op: the public function, for its error message.
        targets: names of trainers or packages. Empty: the trainers that are patched by default, of
            the packages that are installed, or of all if none is.

    Raises:
        ValueError: a target is unknown.
    """
    unknown = [t for t in targets if t not in TRAINERS and t not in PACKAGES]
    if unknown:
        names = ", ".join(TRAINERS)
        raise ValueError(f"{op}: targets must be among {names} or their packages; got {', '.join(unknown)}")
    if targets:
        lines = [line for package in PACKAGES if package in targets for line in _lines_of(package)]
    else:
        installed = [package for package in PACKAGES if _version(package) is not None]
        lines = [line for package in installed or PACKAGES for line in _lines_of(package) if line.by_default]
    chosen = {*targets, *(line.trainer for line in lines)}
    return [trainer for trainer in TRAINERS if trainer in chosen]


def _lines_of(package: str) -> list[Line]:
    """The lines of a package that support the installed version, or all lines if none does."""
    lines = [line for line in LINES if line.package == package]
    version = _version(package)
    return [line for line in lines if version is not None and _supports(line, version)] or lines


def _supports(line: Line, version: str) -> bool:
    return SpecifierSet(line.versions).contains(Version(version), prereleases=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine(name: str, is_targeted: bool) -> tuple[Seam, TrainerLine | None]:
    """The seam, and the module that can patch the trainer, or None."""
    lines = [line for line in LINES if line.trainer == name]
    package = lines[0].package
    distribution = DISTRIBUTIONS.get(package, package)
    version = _version(package)
    if version is None:
        return Seam(name, None, f"{distribution} is not installed"), None
    line = next((line for line in lines if _supports(line, version)), None)
    if line is None:
        reason = unsupported_version_reason(distribution, version, [line.versions for line in lines])
        return Seam(name, version, reason), None
    imported = any(module in sys.modules for module in line.trainer_modules)
    if package in CHANGING_OTHERS and not is_targeted and not imported:
        reason = f"the program has not imported it yet: call patch() later, or patch({package!r})"
        return Seam(name, version, reason), None
    module = cast(TrainerLine, importlib.import_module(f".{line.module}", __package__))
    earlier = set(sys.modules)
    try:
        reason = module.unsupported_reason()
    except Exception as error:  # of any kind: transformers turns ImportError into RuntimeError
        reason = " ".join(f"{package} cannot be imported: {error}".split())  # in one line
        new = sys.modules.keys() - earlier
        for module_name in (x for x in new if x.partition(".")[0] == package):
            del sys.modules[module_name]  # a later import may succeed: TRL 0.24's does after LLaMA-Factory's
    if reason is not None:
        return Seam(name, version, reason), None
    existing = tuple(sorted(type(trainer).__name__ for trainer in existing_instances(module.trainer_class())))
    return Seam(name, version, None, existing), module
