"""`patch()` and `unpatch()`, and the report of which trainers are patched, and why others are not."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, ParamSpec, cast

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .. import checks
from ..logs import logger, warn
from ..models import fallback, forward
from ..models.layouts import SharePrompts
from ..reasons import Reason
from . import savings
from .arguments import checked_options
from .protocol import STATE, PatchOptions, TrainerLine
from .replacements import existing_instances
from .versions import unsupported_version_reason

_P = ParamSpec("_P")


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

Target = str | type
"""A trainer by its name or its class, or a package by its name."""

TRAINERS = tuple(dict.fromkeys(line.trainer for line in LINES))
PACKAGES = tuple(dict.fromkeys(line.package for line in LINES))

APPLIES = {
    "reference_memory": ("trl.DPOTrainer", "openrlhf.DPOTrainer"),
    "max_tokens": ("trl.DPOTrainer",),
    "group_prompts": ("trl.DPOTrainer",),
    "longest_first": ("trl.DPOTrainer",),
    "log_savings": tuple(trainer for trainer in TRAINERS if trainer != "openrlhf.DPOTrainer"),
}
"""The trainers to which options apply that only some trainers have."""


class PatchError(RuntimeError):
    """A trainer that was named cannot be patched, or is already patched with other options. With
    `FASTDPO_STRICT=1`, also any other trainer that `patch` would leave unpatched.
    """


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
    reason: Reason | None
    stock_trainers: tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        state = "on" if self.reason is None else f"off, {self.reason.named}"
        text = f"{self.name}{f' ({self.version})' if self.version else ''}: {state}"
        if self.stock_trainers:
            text += f"; created before patch() and not patched: {', '.join(self.stock_trainers)}"
        return text


@dataclass(frozen=True)
class PatchReport:
    """The result of `patch()`."""

    seams: tuple[Seam, ...]

    def __str__(self) -> str:
        return "fastdpo: " + " | ".join(map(str, self.seams))


class _Examined(NamedTuple):
    """A trainer that was examined.

    Attributes:
        seam: without the trainers created before `patch()`.
        line: the module that can patch the trainer, or None.
        stock: the trainers created before `patch()`, by their ids. Trainers may have no hash.
    """

    seam: Seam
    line: TrainerLine | None
    stock: weakref.WeakValueDictionary[int, Any]

    def current_seam(self) -> Seam:
        """The seam, with the trainers created before `patch()` that still exist."""
        return replace(self.seam, stock_trainers=tuple(sorted(type(x).__name__ for x in self.stock.values())))


class _Patched(NamedTuple):
    """A trainer that is patched."""

    examined: _Examined
    options: PatchOptions
    line: TrainerLine


_patched: dict[str, _Patched] = {}

_said: set[str] = set()
"""The warnings that were logged since the last `unpatch()`."""

_said_of: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The trainers, by their ids, that were warned about because they were created before `patch()`."""


def patch(
    *targets: Target | Sequence[Target],
    share_prompts: SharePrompts = True,
    memory_budget: int | None = None,
    reference_memory: bool | str | os.PathLike[str] = False,
    verify: bool = False,
    max_tokens: int | None = None,
    group_prompts: bool = False,
    log_savings: bool = False,
    longest_first: bool = False,
) -> PatchReport:
    """Patches trainers. Those created afterwards train packed, with shared prompts and a fused
    head.

    Numbers stay the same up to rounding. Calling `patch` again with the same options changes
    nothing. A trainer that cannot be patched is left exactly as it was, and the report says why.

    The logger "fastdpo" logs the report as one line. Its level is WARNING if a trainer of the
    report is off, or was created before and stays unpatched, until each of them was logged once;
    otherwise INFO. Trainers of packages that are not installed are left out, unless none is
    installed: then all are off.

    Args:
        *targets: names of trainers ("trl.DPOTrainer"), trainer classes (`trl.DPOTrainer`), or names
            of packages ("trl"): all trainers of the package that are supported in the installed
            version. Lists of them are accepted, too. Default: the preference trainers of all
            packages that are installed.
        share_prompts: compute the tokens that the two answers to a prompt begin with once. With
            dropout, they then draw the same values for these tokens; "deterministic" shares them
            only where nothing is drawn.
        memory_budget: bytes of the head's gradient tiles to keep from forward to backward, an integer
            or None for the default of `ops.linear_logps`.
        reference_memory: remember the reference's log-probabilities of each pair when they are
            first computed, so that later epochs, and evaluations after the first, do not run the
            reference. With the path or URL of a directory, later processes remember them, too.
            Applies to the DPOTrainers of TRL and OpenRLHF; a warning says so if none of them is
            patched. Disabled, with a logged reason, where the reference is trained or random, and
            where ranks run it together without agreement.
        verify: compare the first fused calls of each model of a trainer with stock ones, and raise
            `VerificationError` if they differ by more than rounding explains, before any weight is
            changed. Costs two more forward and backward passes, once. The training ends in the same
            weights as without.
        max_tokens: cut the pairs of each optimizer step into micro-batches of up to this many
            distinct tokens, with balanced costs on all ranks, instead of fixed numbers of pairs.
            Loss and gradient of a step stay the same up to rounding. Applies to TRL's DPOTrainer; a
            warning says so if it is not patched. Before training, an error names a pair that has
            more tokens, and options of the trainer that are not supported.
        group_prompts: put the pairs of one prompt into one batch, whose rows then share it. Each epoch
            has the pairs that it has without, in another order, so its steps are not those of the
            unpatched trainer. Applies to TRL's DPOTrainer; a warning says so if it is not patched.
        log_savings: add `fastdpo/tokens_saved` to each training log: the part of the tokens in the
            padded batches since the last log that was not computed, over all ranks. Applies to
            subclasses of transformers' Trainer.
        longest_first: after the first optimizer step, run the largest batch of the training forward
            and backward, and discard what it computes, so that a training that runs out of memory
            does so in its first minute. The error then names the batch and what to change. The
            training ends in the same weights as without. Applies to TRL's DPOTrainer, with a
            warning and errors as for `max_tokens`.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: a target is unknown, or an option is malformed.
        PatchError: a named target cannot be patched, or is already patched with other options. With
            `FASTDPO_STRICT=1`, also if any trainer of the report is off or was created before.
            Nothing is changed then.
    """
    options = checked_options(
        "patch",
        share_prompts=share_prompts,
        memory_budget=memory_budget,
        reference_memory=reference_memory,
        verify=verify,
        max_tokens=max_tokens,
        group_prompts=group_prompts,
        log_savings=log_savings,
        longest_first=longest_first,
    )
    names = targeted_trainers("patch", targets)
    examined: dict[str, _Examined] = {}
    for name in sorted(names, key=_trl_last):
        before = _patched.get(name)
        if before is not None and before.options != options:
            raise PatchError(f"patch: {name} is patched with {before.options}; call fastdpo.unpatch() first")
        examined[name] = _examine(name, bool(targets)) if before is None else before.examined
    report = PatchReport(tuple(examined[name].current_seam() for name in names))
    if targets and not all(seam.on for seam in report.seams):
        raise PatchError(f"patch: {report}")
    if fallback.strict() and not all(seam.on and not seam.stock_trainers for seam in report.seams):
        raise PatchError(f"patch: {report} (FASTDPO_STRICT=1)")

    for name in names:
        line = examined[name].line
        if line is not None and name not in _patched:
            line.enable(options)
            if options.log_savings and name in APPLIES["log_savings"]:
                savings.enable(name, line.trainer_class())
            _patched[name] = _Patched(examined[name], options, line)
    _log(report, examined.values())
    on = [seam.name for seam in report.seams if seam.on]
    for option, trainers in APPLIES.items():
        if getattr(options, option):
            _log_unaffected(option, on, [name for name in on if name not in trainers])
    return report


def _log_unaffected(option: str, on: list[str], unaffected: list[str]) -> None:
    """Logs the trainers that have no use for an option, as a warning if they are all."""
    message = f"{option} does not apply to {', '.join(unaffected)}"
    if unaffected and unaffected == on and message not in _said:
        _said.add(message)
        warn(message)
    elif unaffected:
        logger.info("fastdpo: %s", message)


def _log(report: PatchReport, examined: Iterable[_Examined]) -> None:
    """Logs the report, as a warning if it holds something that is off and that was not logged yet."""
    off = {str(seam) for seam in report.seams if not seam.on}
    stock = {key: trainer for x in examined for key, trainer in x.stock.items()}
    is_new = not off <= _said or any(key not in _said_of for key in stock)
    _said.update(off)
    _said_of.update(stock)
    (logger.warning if is_new else logger.info)("%s", report)


def examine(*targets: Target | Sequence[Target]) -> PatchReport:
    """What `patch` would report of these trainers. Patches and logs nothing, and raises nothing for
    trainers that cannot be patched.

    Raises:
        TypeError, ValueError: a target is unknown.
    """
    names = targeted_trainers("examine", targets)
    examined = {name: _examine(name, bool(targets)) for name in sorted(names, key=_trl_last)}
    return PatchReport(tuple(examined[name].current_seam() for name in names))


def unpatch() -> None:
    """Undoes `patch()`, for trainer classes and for existing trainers and models."""
    _undo(set(_patched))
    _said.clear()
    _said_of.clear()


def _during_a_block(patch: Callable[_P, PatchReport]) -> Callable[_P, AbstractContextManager[PatchReport]]:
    @contextmanager
    def patched(*targets: _P.args, **options: _P.kwargs) -> Iterator[PatchReport]:
        """Patches trainers during a `with` block. Takes the arguments of
        `patch`, and keeps earlier patches.
        """
        before = set(_patched)
        report = patch(*targets, **options)
        try:
            yield report
        finally:
            _undo(set(_patched) - before)

    signature = inspect.signature(patch).replace(return_annotation=AbstractContextManager[PatchReport])
    vars(patched)["__signature__"] = signature  # for help()
    return patched


patched = _during_a_block(patch)


def _undo(names: set[str]) -> None:
    for name in names:
        savings.disable(name)
        _patched.pop(name).line.disable()
        forward.uninstall_all(name)


def targeted_trainers(op: str, targets: Sequence[object]) -> list[str]:
    """The names of the trainers that are targeted, by their names or classes, or by their packages.

    A package stands for its trainers that have a line for the installed version. If there are none,
    it stands for all of its trainers, and each has a reason why it cannot be patched.

    Args:
        op: the public function, for its error message.
        targets: names of trainers or packages, trainer classes, or lists of these. None of them:
            the trainers that are patched by default, of the packages that are installed, or of all
            if none is.

    Raises:
        TypeError: a target is neither a name nor a class.
        ValueError: a target is unknown, or a list is empty.
    """
    names = [_target_name(op, target) for target in _flat(op, targets)]
    if names:
        lines = [line for package in PACKAGES if package in names for line in _lines_of(package)]
    else:
        installed = [package for package in PACKAGES if _version(package) is not None]
        lines = [line for package in installed or PACKAGES for line in _lines_of(package) if line.by_default]
    chosen = {*names, *(line.trainer for line in lines)}
    return [trainer for trainer in TRAINERS if trainer in chosen]


def _trl_last(name: str) -> bool:
    """The order in which trainers are examined: with transformers 5, TRL 0.24 can be imported only
    after LLaMA-Factory.
    """
    return name.startswith("trl.")


def _flat(op: str, targets: Sequence[object]) -> Iterator[object]:
    for target in targets:
        if not isinstance(target, list | tuple | set | frozenset):
            yield target
        elif target:
            yield from target
        else:
            raise ValueError(f"{op}: targets must not be empty; got {target}")


def _target_name(op: str, target: object) -> str:
    """The name of a trainer or of a package."""
    rule = f"{op}: targets must be among {', '.join(TRAINERS)} or their packages, by name, or be trainer classes"
    if isinstance(target, str):
        if target in TRAINERS or target in PACKAGES:
            return target
        raise ValueError(f"{rule}; got {checks.shown(target)}")
    if not isinstance(target, type):
        raise TypeError(f"{rule}; got {checks.shown(target)}")
    for line in LINES:
        if target.__module__ in line.trainer_modules and target.__name__.endswith(line.trainer.rpartition(".")[2]):
            return line.trainer
    raise ValueError(f"{rule}; got {target.__module__}.{target.__qualname__}")


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


def _examine(name: str, is_targeted: bool) -> _Examined:
    def off(version: str | None, reason: Reason) -> _Examined:
        return _Examined(Seam(name, version, reason), None, weakref.WeakValueDictionary())

    lines = [line for line in LINES if line.trainer == name]
    package = lines[0].package
    distribution = DISTRIBUTIONS.get(package, package)
    version = _version(package)
    if version is None:
        return off(None, Reason("not-installed", distribution=distribution))
    line = next((line for line in lines if _supports(line, version)), None)
    if line is None:
        reason = unsupported_version_reason(distribution, version, [line.versions for line in lines])
        return off(version, reason)
    imported = any(module in sys.modules for module in line.trainer_modules)
    if package in CHANGING_OTHERS and not is_targeted and not imported:
        return off(version, Reason("not-imported", package=package))
    module = cast(TrainerLine, importlib.import_module(f".{line.module}", __package__))
    earlier = set(sys.modules)
    try:
        reason = module.unsupported_reason()
    except Exception as error:  # of any kind: transformers turns ImportError into RuntimeError
        reason = Reason("import-error", package=package, error=" ".join(str(error).split()))  # in one line
        new = sys.modules.keys() - earlier
        for module_name in (x for x in new if x.partition(".")[0] == package):
            del sys.modules[module_name]  # a later import may succeed: TRL 0.24's does after LLaMA-Factory's
    if reason is not None:
        return off(version, reason)
    return _Examined(Seam(name, version, None), module, _stock_trainers(module.trainer_class()))


def _stock_trainers(kind: type) -> weakref.WeakValueDictionary[int, Any]:
    """The trainers of a class that exist and are not patched, by their ids."""
    if existing_instances(kind):
        gc.collect()  # trainers are parts of reference cycles, so finished ones may still be there
    # The line of a subclass may have patched a trainer already.
    stock = (x for x in existing_instances(kind) if vars(x).get(STATE) is None)
    return weakref.WeakValueDictionary((id(trainer), trainer) for trainer in stock)
