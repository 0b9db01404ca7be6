"""`patch()` and `unpatch()`, and the report of which trainers are patched, and why others are not."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack, cast

from ..logs import logger, strict, warn
from ..reasons import Reason
from .admission import packages, tested_code
from .admission.versions import installed_version, unsupported_version_reason
from .bypass import existing_trainers
from .line import TrainerLine
from .lines import CHANGING_OTHERS, Line, Target, lines_of, targeted_trainers
from .options import OPTIONS, GivenOptions, PatchOptions, applies, checked_options, specific_options


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
        tested: the specifiers of the tested versions, of those packages that are installed in newer ones.
        compared: whether the first fused calls are compared with stock ones, since the trainer's package is newer.
    """

    name: str
    version: str | None
    reason: Reason | None
    stock_trainers: tuple[str, ...] = ()
    tested: str | None = None
    compared: bool = False

    @property
    def on(self) -> bool:
        return self.reason is None

    @property
    def provisional(self) -> str | None:
        """Why the trainer is patched provisionally; None if it is not."""
        if not self.on or self.tested is None:
            return None
        comparison = ": its first calls are compared with stock ones" if self.compared else ""
        return f"newer than the tested versions, {self.tested}{comparison}"

    def __str__(self) -> str:
        state = "on" if self.reason is None else f"off, {self.reason.named}"
        if self.provisional:
            state += f", provisionally: {self.provisional}"
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
    """A trainer that was examined, and how it is patched, if it is.

    Attributes:
        seam: without the trainers created before `patch()`.
        line: can patch the trainer, or has patched it; None if it is off.
        stock: the trainers created before `patch()`, by their ids. Trainers may have no hash.
        options: those that it is patched with.
        by_run: whether only `fastdpo run` has patched it, so that the program may give further options.
        sources: by option, who has given it.
        changed: by option, the functions that it relies on and that differ from those of the tested versions.
    """

    seam: Seam
    line: TrainerLine | None
    stock: weakref.WeakValueDictionary[int, Any]
    options: PatchOptions = PatchOptions()
    by_run: bool = False
    sources: Mapping[str, str] = MappingProxyType({})
    changed: Mapping[str, list[str]] = MappingProxyType({})

    def current_seam(self) -> Seam:
        """The seam, with the trainers created before `patch()` that still exist."""
        return replace(self.seam, stock_trainers=tuple(sorted(type(x).__name__ for x in self.stock.values())))


RUN, CALL = "`fastdpo run`", "an earlier call of patch()"
"""Who patches a trainer, in messages."""

_patched: dict[str, _Examined] = {}

_lock = threading.RLock()
"""Held while trainers are patched or restored. An import within may patch more of them, under `fastdpo run`."""

_said: set[str] = set()
"""The warnings that were logged since the last `unpatch()`."""

_said_of: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The trainers, by their ids, that were warned about because they were created before `patch()`."""


def patch(*targets: Target | Sequence[Target], **options: Unpack[GivenOptions]) -> PatchReport:
    """Patches trainers. Those created afterwards train packed, with shared prompts and a fused
    head.

    Numbers stay the same up to rounding. Calling `patch` again with the same options, or without any,
    changes nothing. A trainer that cannot be patched is left exactly as it was, and the report says
    why.

    Under `fastdpo run`, options that a call gives are added to those of the command.

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
        verify: compare the first fused calls of each model of a trainer with stock ones, and raise
            `VerificationError` if they differ by more than rounding explains, before any weight is
            changed. Costs two more forward and backward passes, once. The training ends in the same
            weights as without.
        max_tokens: cut the rows of each optimizer step into micro-batches of up to this many
            distinct tokens, with rows that begin alike together, in TRL's DPOTrainer, RewardTrainer, GRPOTrainer,
            RLOOTrainer, SFTTrainer and KTOTrainer. Loss and gradient of a step stay the same up to rounding. A
            warning says so if none of them is patched. Before training, an error names options of the trainer that
            are not supported. With "auto",
            micro-batches begin with the tokens of those of the unpatched trainer, and grow in the first steps as
            far as that is useful and fits into four fifths of the device's memory; a line logs the number that
            repeats them.
        compile: compile the decoder layers for packed calls, once for batches of all lengths. Other calls run the
            layers as they are. Disabled, with a logged reason, where layers cannot be compiled as a whole.
        graphs: replay CUDA graphs of packed calls. Disabled, with a logged reason, where these cannot be recorded.
        provisional: patch trainers of versions that are newer than the tested ones, whose first fused calls are
            compared with stock ones.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: a target is unknown, or an option is malformed.
        PatchError: a named target cannot be patched, or is already patched with other options, by an
            earlier call or by `fastdpo run`. With `FASTDPO_STRICT=1`, also if any trainer of the report
            is off or was created before. Nothing is changed then.
    """
    names, given = targeted_trainers("patch", targets), checked_options("patch", {**options})
    with _lock:
        return _patch(_examine_all(names, bool(targets)), given, is_targeted=bool(targets))


def patch_for_run(trainer: str, options: dict[str, Any]) -> PatchReport:
    """As `patch`, for `fastdpo run` and its options, right after the program has imported the trainer."""
    given = checked_options("run", options)
    with _lock:
        return _patch(_examine_all([trainer], True), given, is_targeted=True, source=RUN)


def _patch(
    examined: dict[str, _Examined], given: dict[str, Any], *, is_targeted: bool, source: str = CALL
) -> PatchReport:
    options = {name: _options_of(name, given) for name in examined}
    examined = {name: _with_options(x, options[name]) for name, x in examined.items()}
    report = PatchReport(tuple(x.current_seam() for x in examined.values()))
    if is_targeted and not all(seam.on for seam in report.seams):
        raise PatchError(f"patch: {report}")
    if strict() and not all(seam.on and not seam.stock_trainers for seam in report.seams):
        raise PatchError(f"patch: {report} (FASTDPO_STRICT=1)")

    for name, found in examined.items():
        before = _patched.get(name)
        if found.line is not None and (before is None or before.options != options[name]):
            sources = {**found.sources, **dict.fromkeys(given, source)}
            _undo({name})
            _enable(found._replace(options=options[name], by_run=source == RUN, sources=sources))
    _log(report, examined.values())
    on = [seam.name for seam in report.seams if seam.on]
    for option in OPTIONS:
        if given.get(option):
            _log_unaffected(option, on, [name for name in on if not applies(option, name)])
    return report


def _options_of(name: str, given: dict[str, Any]) -> PatchOptions:
    """The options of a trainer that is about to be patched: those that it has, changed by those that are given.

    Raises:
        PatchError: it is already patched, and the given options would change what was decided.
    """
    before = _patched.get(name)
    if before is None:
        return PatchOptions(**given)
    changed = [option for option, value in given.items() if value != getattr(before.options, option)]
    decided = [option for option in changed if option in before.sources or not before.by_run]
    if decided:
        had, got = (", ".join(text) for text in zip(*(_difference(before, x, given[x]) for x in decided), strict=True))
        raise PatchError(
            f"patch: options must be those that {name} is patched with, {had}; got {got}. "
            "Give an option once, or call fastdpo.unpatch() first"
        )
    kind = cast(TrainerLine, before.line).trainer_class()
    if changed and (trainers := existing_trainers(kind, patched=True)):
        raise PatchError(
            f"patch: {', '.join(changed)} must be given before a trainer is created under {RUN}; "
            f"got {', '.join(sorted({type(x).__name__ for x in trainers}))}"
        )
    return replace(before.options, **given)


def _with_options(examined: _Examined, options: PatchOptions) -> _Examined:
    """What was examined, or that it is off if it is provisional and is not to be, or if an option relies on
    functions that have changed.
    """
    seam, reason = examined.seam, None
    lines = lines_of(seam.name)
    relying = [name for name, functions in examined.changed.items() if functions and getattr(options, name)]
    is_newer = seam.on and not any(line.supports(seam.version) for line in lines)
    if is_newer and not options.provisional:
        reason = unsupported_version_reason(lines[0].distribution, seam.version or "", [x.versions for x in lines])
    elif relying:
        functions = dict.fromkeys(function for name in relying for function in examined.changed[name])
        functions = f"{', '.join(functions)}, on which {' and '.join(relying)} relies"
        reason = Reason("changed-code", functions=functions)
    return examined if reason is None else examined._replace(seam=replace(seam, reason=reason), line=None)


def _difference(before: _Examined, option: str, value: object) -> tuple[str, str]:
    """An option as the trainer has it and who gave it, and as it is given now."""
    source = before.sources.get(option, CALL)
    return f"{option}={getattr(before.options, option)!r} by {source}", f"{option}={value!r}"


def _enable(examined: _Examined) -> None:
    cast(TrainerLine, examined.line).enable(examined.options)
    _patched[examined.seam.name] = examined


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
    with _lock:
        examined = _examine_all(targeted_trainers("examine", targets), bool(targets))
    return PatchReport(tuple(x.current_seam() for x in examined.values()))


def options_of(trainer: str) -> PatchOptions | None:
    """The options that a trainer is patched with, or None if it is not."""
    return _patched[trainer].options if trainer in _patched else None


def unpatch() -> None:
    """Undoes `patch()`, for trainer classes and for existing trainers and models."""
    with _lock:
        _undo(set(_patched))
        _said.clear()
        _said_of.clear()


@contextmanager
def patched(*targets: Target | Sequence[Target], **options: Unpack[GivenOptions]) -> Iterator[PatchReport]:
    """Patches trainers during a `with` block. Takes the arguments of `patch`, and keeps earlier patches."""
    names, given = targeted_trainers("patch", targets), checked_options("patch", {**options})
    with _lock:
        examined = _examine_all(names, bool(targets))
        before = dict(_patched)  # with what `fastdpo run` has patched at its import
        report = _patch(examined, given, is_targeted=bool(targets))
    try:
        yield report
    finally:
        with _lock:
            changed = {name for name, x in _patched.items() if x is not before.get(name)}
            _undo(changed)
            for name in changed & before.keys():
                _enable(before[name])


def _name_options(function: Any) -> None:
    """Gives a function of `GivenOptions` a signature with their names, for help()."""
    signature = inspect.signature(function)
    *others, _ = signature.parameters.values()
    named = [
        inspect.Parameter(x.name, inspect.Parameter.KEYWORD_ONLY, default=x.default, annotation=x.type)
        for x in fields(PatchOptions)
        if x.name in OPTIONS
    ]
    function.__signature__ = signature.replace(parameters=[*others, *named])


_name_options(patch)
_name_options(patched)


def _undo(names: set[str]) -> None:
    for name in names & _patched.keys():
        cast(TrainerLine, _patched.pop(name).line).disable()


def _trl_last(name: str) -> bool:
    """The order in which trainers are examined: with transformers 5, TRL 0.24 can be imported only
    after LLaMA-Factory.
    """
    return name.startswith("trl.")


def _examine_all(names: list[str], is_targeted: bool) -> dict[str, _Examined]:
    """Examines trainers by their names, in the order of `_trl_last`. Returns them in the order that is given."""
    examined = {name: _examine(name, is_targeted) for name in sorted(names, key=_trl_last)}
    new = {name: x.line for name, x in examined.items() if name not in _patched}
    kinds = {name: line.trainer_class() for name, line in new.items() if line is not None}
    stock = existing_trainers(*kinds.values(), patched=False)
    for name, kind in kinds.items():
        own = weakref.WeakValueDictionary({id(x): x for x in stock if isinstance(x, kind)})
        examined[name] = examined[name]._replace(stock=own)
    return {name: examined[name] for name in names}


def _examine(name: str, is_targeted: bool) -> _Examined:
    """Imports a trainer, which `fastdpo run` patches then, and examines it unless it is patched."""
    if name in _patched:
        return _patched[name]
    lines = lines_of(name)
    version = installed_version(lines[0].package)
    line = next((line for line in lines if line.supports(version)), lines[0])
    reason, trainer_line = _unavailable_reason(line, lines, version, is_targeted), None
    if reason is None:
        trainer_line, reason = _imported(line)
    if name in _patched:
        return _patched[name]
    if reason is not None or trainer_line is None:
        return _Examined(Seam(name, version, reason), None, weakref.WeakValueDictionary())
    tested = [f"{line.distribution}{line.versions}"] if trainer_line.is_newer else []
    tested += [f"{x}<={y.tested}" for x, y in packages.PACKAGES.items() if x in trainer_line.newer]
    seam = Seam(name, version, None, tested=", ".join(tested) or None, compared=trainer_line.is_newer)
    relied_on = {option: trainer_line.options_rely_on.get(option, ()) for option in specific_options(name)}
    changed = {option: trainer_line.changed_code(functions) for option, functions in relied_on.items()}
    return _Examined(seam, trainer_line, weakref.WeakValueDictionary(), changed=changed)


def _unavailable_reason(line: Line, lines: list[Line], version: str | None, is_targeted: bool) -> Reason | None:
    """Why a trainer is not imported: its package is not installed, or its version is not supported by any of its
    lines, or its import would change other packages.
    """
    if not line.supports(version):
        if version is None:
            return Reason("not-installed", distribution=line.distribution)
        if not line.precedes(version) or not tested_code.has_tested(line.package):
            return unsupported_version_reason(line.distribution, version, [line.versions for line in lines])
    imported = any(module in sys.modules for module in line.trainer_modules)
    if line.package in CHANGING_OTHERS and not is_targeted and not imported:
        return Reason("not-imported", package=line.package)
    return None


def _imported(line: Line) -> tuple[TrainerLine | None, Reason | None]:
    """The trainer line, and why it does not support the trainer, if so. A failed import leaves no module of the
    package behind: a later one may succeed, as TRL 0.24's does after LLaMA-Factory's.
    """
    earlier = set(sys.modules)
    try:
        trainer_line = line.load()
        return trainer_line, trainer_line.unsupported_reason() or packages.missing_reason()
    except Exception as error:  # of any kind: transformers turns ImportError into RuntimeError
        message = " ".join(str(error).split())  # in one line
        for module in [x for x in sys.modules.keys() - earlier if x.partition(".")[0] == line.package]:
            del sys.modules[module]
        return None, packages.missing_reason() or Reason("import-error", package=line.package, error=message)
