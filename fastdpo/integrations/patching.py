"""`patch()` and `unpatch()`, and the report of which trainers are patched, and why others are not."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..logs import logger, strict, warn
from ..reasons import Reason
from .admission import packages, tested_code
from .admission.versions import installed_version, unsupported_version_reason
from .bypass import STATE, existing_instances
from .imports import ImportWatcher
from .line import TrainerLine
from .options import PatchOptions
from .registry import CHANGING_OTHERS, ENTRIES, Entry, Target, applies, entries_of, targeted_trainers

if TYPE_CHECKING:
    from ..models.running import Compile


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
        newer: the installed packages, with their versions, that are newer than the tested ones.
        imported: whether its module is imported. Otherwise the trainer is patched, or reported as off, when it is.
    """

    name: str
    version: str | None
    reason: Reason | None
    stock_trainers: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    imported: bool = True

    @property
    def on(self) -> bool:
        return self.reason is None

    @property
    def state(self) -> str:
        """The version and what is said of it, in words."""
        state = f"off, {self.reason.named}" if self.reason else "on" if self.imported else "on when imported"
        text = f"{f' ({self.version})' if self.version else ''}: {state}"
        if self.stock_trainers:
            text += f"; created before patch() and not patched: {', '.join(self.stock_trainers)}"
        return text

    def __str__(self) -> str:
        return f"{self.name}{self.state}"


@dataclass(frozen=True)
class PatchReport:
    """The result of `patch()`.

    Attributes:
        seams: an entry for each trainer.
        note: which packages are newer than the tested versions, and what follows from it, or "". One report of a
            process has it.
    """

    seams: tuple[Seam, ...]
    note: str = ""

    def __str__(self) -> str:
        """In one line, with the trainers of which the same is said together."""
        names: dict[str, list[str]] = {}
        for seam in self.seams:
            names.setdefault(seam.state, []).append(seam.name)
        said = [f"{', '.join(each)}{state}" for state, each in names.items()]
        return "fastdpo: " + " | ".join([*said, *filter(None, [self.note])])


class _Examined(NamedTuple):
    """A trainer that was examined, and how it is patched, if it is.

    Attributes:
        seam: without `stock_trainers`.
        line: can patch the trainer, or has patched it; None if it is off, or not imported.
        options: those that it is patched with.
    """

    seam: Seam
    line: TrainerLine | None
    options: PatchOptions = PatchOptions()


_patched: dict[str, _Examined] = {}
"""The trainers that are patched, and those that are as soon as they are imported."""

_lock = threading.RLock()
"""Held while trainers are patched or restored. An import within may patch more of them."""

_said: set[str] = set()
"""The warnings that were logged since the last `unpatch()`."""

noted: set[str] = set()
"""The packages that notes of reports have named in this process."""


def patch(
    *targets: Target | Sequence[Target],
    share_prompts: bool = True,
    max_tokens: int | Literal["own", "auto"] | None = "own",
    compile: Compile = "auto",
    verify: bool = False,
) -> PatchReport:
    """Patches trainers. Those created afterwards train packed, with shared prompts and a fused
    head. Numbers stay the same up to rounding.

    A second call with the same options changes nothing. With other options for a trainer that is
    patched, by an earlier call or by `fastdpo run`, it raises an error: call `unpatch()` first.

    Args:
        *targets: names of trainers ("trl.DPOTrainer") or of packages ("trl"), trainer classes, or
            lists of them. Default: all trainers of all installed packages but TRL's SFTTrainer, each
            as soon as the program has imported it.
        share_prompts: compute what rows of a batch begin with once. With dropout, they then draw
            the same values for these tokens.
        max_tokens: cut the rows of each optimizer step into micro-batches of up to this many
            distinct tokens: with "own", of as many as the trainer's largest padded batch has, where
            nothing can tell the difference; with "auto", of as many as are useful and fit into the
            device's memory. TRL's DPO-, Reward-, KTO-, SFT-, GRPO-, RLOO- and TPOTrainer take it.
        compile: compile the decoder layers for packed calls, once for batches of all lengths, and
            replay CUDA graphs where that is faster. "auto": on a GPU, where both pay in what is left of
            the training.
        verify: compare fused calls 1, 2, 4, 8, ... of each model with stock ones, and raise
            `VerificationError` if they differ by more than rounding.

    Returns:
        The report, which is also logged: which trainers are patched, and why others are not.

    Raises:
        TypeError, ValueError: a target is unknown, or an option is malformed.
        PatchError: a named target cannot be patched, or a trainer is patched with other options.
            With `FASTDPO_STRICT=1`, also if any trainer of the report is off, or was created
            before. Nothing is changed then.
    """
    return _patch(targets, PatchOptions(share_prompts, max_tokens, compile, verify))[0]


@contextmanager
def patched(
    *targets: Target | Sequence[Target],
    share_prompts: bool = True,
    max_tokens: int | Literal["own", "auto"] | None = "own",
    compile: Compile = "auto",
    verify: bool = False,
) -> Iterator[PatchReport]:
    """Patches trainers during a `with` block. Takes the arguments of `patch`, and keeps what is patched already."""
    report, new = _patch(targets, PatchOptions(share_prompts, max_tokens, compile, verify))
    try:
        yield report
    finally:
        with _lock:
            # One that was imported in the block is another entry, with the same options.
            _undo({x.seam.name for x in new if options_of(x.seam.name) is x.options})


def _patch(targets: Sequence[Target | Sequence[Target]], options: PatchOptions) -> tuple[PatchReport, list[_Examined]]:
    """The report of `patch`, and the trainers that were not patched before."""
    names, options = targeted_trainers("patch", targets), options.checked("patch")
    with _lock:
        examined = [_with_options(x, options) for x in _examine_all(names, names if targets else ())]
        report = _report(_with_stock(examined))
        if targets and not all(seam.on for seam in report.seams):
            raise PatchError(f"patch: {report}")
        if strict() and not all(seam.on and not seam.stock_trainers for seam in report.seams):
            raise PatchError(f"patch: {report} (FASTDPO_STRICT=1)")

        new = [x for x in examined if x.seam.on and _patched.get(x.seam.name) is not x]
        _enable(new)
        _log(report)
        for option in options.given():
            _log_unaffected(option, [seam.name for seam in report.seams if seam.on])
    return report, new


def _enable(new: Iterable[_Examined]) -> None:
    """Patches trainers, and waits for those that are not imported."""
    for found in new:
        if found.line is not None:
            found.line.enable(found.options)
        elif _watcher not in sys.meta_path:
            sys.meta_path.insert(0, _watcher)
        _patched[found.seam.name] = found


def _patch_imported(name: str) -> None:
    """Patches a trainer whose module has just been imported, if `patch` has been waiting for that."""
    with _lock:
        if name not in _patched or _patched[name].line is not None:
            return
        examined = [_with_options(_examine(name, imports=True), _patched[name].options)]
        report = _report((examined[0].seam,))
        if examined[0].seam.on:
            _enable(examined)
        else:
            del _patched[name]
            if strict():
                raise PatchError(f"patch: {report} (FASTDPO_STRICT=1)")
        _log(report)


_watcher = ImportWatcher({x.trainer_module: x.trainer for x in ENTRIES}, _patch_imported)


def _report(seams: tuple[Seam, ...]) -> PatchReport:
    """The report on trainers, with a note on newer versions that no report has had."""
    newer = dict.fromkeys(package for seam in seams if seam.on for package in seam.newer)
    if noted.issuperset(newer):
        return PatchReport(seams)
    noted.update(newer)
    why = "calls of each model are compared with stock ones"
    return PatchReport(seams, f"provisionally, newer than tested: {', '.join(newer)}. Nothing is to be done: {why}")


def _with_options(examined: _Examined, options: PatchOptions) -> _Examined:
    """What was examined, to be patched with these options.

    Raises:
        PatchError: it is patched with others.
    """
    known = _patched.get(examined.seam.name)
    if known is None:
        return examined._replace(options=options)
    others = [name for name in options._fields if getattr(options, name) != getattr(known.options, name)]
    if others:
        had, got = (", ".join(f"{name}={getattr(x, name)!r}" for name in others) for x in (known.options, options))
        raise PatchError(
            f"patch: options must be those that {known.seam.name} is patched with, {had}; got {got}. "
            "Give the same options to each call and to `fastdpo run`, or call fastdpo.unpatch() first"
        )
    return examined if known is examined else examined._replace(options=options)


def _log_unaffected(option: str, on: list[str]) -> None:
    """Logs the patched trainers that have no use for an option, as a warning if they are all."""
    unaffected = [name for name in on if not applies(option, name)]
    message = f"{option} does not apply to {', '.join(unaffected)}"
    if unaffected and unaffected == on and message not in _said:
        _said.add(message)
        warn(message)
    elif unaffected:
        logger.info("fastdpo: %s", message)


def _log(report: PatchReport) -> None:
    """Logs the report, as a warning if it holds something that is off or was created before, and was not logged yet."""
    off = {str(seam) for seam in report.seams if not seam.on}
    stock = {f"{seam.name}: {trainer}" for seam in report.seams for trainer in seam.stock_trainers}
    new = (off | stock) - _said
    _said.update(new)
    (logger.warning if new else logger.info)("%s", report)


def examine(*targets: Target | Sequence[Target]) -> PatchReport:
    """What `patch` would report of these trainers. Patches and logs nothing, and raises nothing for
    trainers that cannot be patched.

    Raises:
        TypeError, ValueError: a target is unknown.
    """
    with _lock:
        names = targeted_trainers("doctor", targets)
        examined = _examine_all(names, [x for x in names if targets or not x.startswith(CHANGING_OTHERS)])
        return PatchReport(_with_stock(examined))


def options_of(trainer: str) -> PatchOptions | None:
    """The options that a trainer is patched with, or None if it is not."""
    return _patched[trainer].options if trainer in _patched else None


def unpatch() -> None:
    """Undoes `patch()`, for trainer classes and for existing trainers and models."""
    with _lock:
        _undo(set(_patched))
        _said.clear()


def _undo(names: set[str]) -> None:
    for name in names & _patched.keys():
        line = _patched.pop(name).line
        if line is not None:
            line.disable()
    if all(x.line is not None for x in _patched.values()):  # none waits for an import
        sys.meta_path = [x for x in sys.meta_path if x is not _watcher]  # other threads may go over the old list


def _examine_all(names: list[str], imports: Collection[str]) -> list[_Examined]:
    """Examines trainers by their names, and imports some. Those of TRL are the last: with transformers 5, TRL 0.24 can
    be imported only after LLaMA-Factory.
    """
    ordered = sorted(names, key=lambda name: name.startswith("trl."))
    examined = {name: _examine(name, name in imports) for name in ordered}
    return [examined[name] for name in names]


def _with_stock(examined: Sequence[_Examined]) -> tuple[Seam, ...]:
    """What is known of trainers, with those created before `patch()` that still exist."""
    kinds = {x.seam.name: x.line.trainer_class() for x in examined if x.line is not None}
    stock: list[Any] = []
    if _created_before(*kinds.values()):
        gc.collect()  # trainers are parts of reference cycles, so finished ones may still be there
        stock = _created_before(*kinds.values())
    names = {name: sorted(type(x).__name__ for x in stock if isinstance(x, kind)) for name, kind in kinds.items()}
    return tuple(replace(x.seam, stock_trainers=tuple(names.get(x.seam.name, ()))) for x in examined)


def _created_before(*kinds: type) -> list[Any]:
    """The trainers of some classes that were created before `patch()`. All others have a state, or None in its place,
    some from the line of a subclass.
    """
    return [x for x in existing_instances(*kinds) if STATE not in vars(x)] if kinds else []


def _examine(name: str, imports: bool) -> _Examined:
    """Examines a trainer unless it is patched. If it is not imported, imports it, which may patch it, or leaves it at
    that.
    """
    entries = entries_of(name)
    version = installed_version(entries[0].package)
    entry = next((entry for entry in entries if entry.supports(version)), entries[0])
    imports = imports or entry.trainer_module in sys.modules
    if _is_done(name, imports):
        return _patched[name]
    reason, line = _unavailable_reason(entry, entries, version), None
    if reason is None and imports:
        line, reason = _imported(entry)
    if _is_done(name, imports):
        return _patched[name]
    if reason is not None:
        return _Examined(Seam(name, version, reason), None)
    newer = tuple(f"{x} {installed_version(x)}" for x in sorted(entry.newer()))
    seam = Seam(name, version, None, newer=newer, imported=imports)
    return _Examined(seam, line)


def _is_done(name: str, imports: bool) -> bool:
    """Whether a trainer is patched, or waits for an import that is not made now."""
    return name in _patched and (_patched[name].line is not None or not imports)


def _unavailable_reason(entry: Entry, entries: list[Entry], version: str | None) -> Reason | None:
    """Why a trainer is not imported: its package is not installed, or its version is not supported by any of its
    entries.
    """
    if version is None:
        return Reason("not-installed", distribution=entry.distribution)
    if entry.supports(version) or (entry.precedes(version) and tested_code.has_tested(entry.package)):
        return None
    return unsupported_version_reason(entry.distribution, version, [entry.versions for entry in entries])


def _imported(entry: Entry) -> tuple[TrainerLine | None, Reason | None]:
    """The trainer line, and why it does not support the trainer, if so. A failed import leaves no module of the
    package behind: a later one may succeed, as TRL 0.24's does after LLaMA-Factory's.
    """
    earlier = set(sys.modules)
    try:
        line = entry.load()
        return line, line.unsupported_reason() or packages.missing_reason()
    except Exception as error:  # of any kind: transformers turns ImportError into RuntimeError
        message = " ".join(str(error).split())  # in one line
        for module in [x for x in sys.modules.keys() - earlier if x.partition(".")[0] == entry.package]:
            del sys.modules[module]
        return None, packages.missing_reason() or Reason("import-error", package=entry.package, error=message)
