"""Starts the runs of `fastdpo check` one after the other, and reports what they have computed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...accuracy import Difference
from ...data.files import load_preferences
from ...integrations import patching
from ...integrations.registry import entries_of
from ..model_names import is_reward_model
from . import tiny
from .comparison import Cost, Run, costs, verdicts
from .side import LABELS, PATCHED, PERTURBED, STOCK, TRAINERS, Settings, own_fields, parse_fields

RunSide = Callable[[Settings, str], Run]


class Report(NamedTuple):
    """The result of a check.

    Attributes:
        title: the model, the batches and the versions.
        verdicts, costs: see `verdicts`.
        epoch: the tokens of an epoch of the dataset, see `side.measure`; None if they are not known.
    """

    title: str
    verdicts: list[Difference]
    costs: list[Cost]
    epoch: dict[str, int] | None
    ok: bool


def check(
    model: str | None,
    dataset: str | None,
    *,
    rewards: bool = False,
    batches: int = 2,
    batch_size: int = 4,
    lora: bool = False,
    fields: Sequence[str] = (),
    run: RunSide | None = None,
) -> Report:
    """Compares TRL's DPOTrainer, stock and patched, on a model and pairs, or its RewardTrainer if the model is a
    reward model.

    No more than one run is in memory at a time: each has a process of its own.

    Args:
        model: directory or Hub name of a model with its tokenizer; None for one that is built.
        dataset: path of preference pairs, as `load_preferences` takes; None only without a model.
        rewards: whether the model that is built is a reward model.
        batches: number of batches.
        batch_size: pairs a batch.
        lora: train an adapter.
        fields: command-line options that are fields of the trainer's configuration.
        run: runs a side; by default, in a process of its own.

    Raises:
        ValueError: an argument is malformed, or a run has failed.
    """
    for name, value in (("--batches", batches), ("--batch-size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more; got {value}")
    rewards = rewards if model is None else is_reward_model("check", model)
    _require_trainer(TRAINERS[rewards])
    _hide_progress_of_libraries()
    with tempfile.TemporaryDirectory(prefix="fastdpo-check-") as temporary:
        directory = Path(temporary)
        if model is None or dataset is None:
            paths = tiny.build(directory, pairs=batches * batch_size, rewards=rewards)
        else:
            paths = model, Path(dataset)
        batches = min(batches, -(-len(load_preferences(paths[1])) // batch_size))
        where, size = (str(paths[0]), str(paths[1]), str(directory)), (batches, batch_size)
        settings = Settings(*where, rewards, *size, lora, list(fields))
        _require_fields(settings)
        run = run or run_in_process
        stock, patched = run(settings, STOCK), run(settings, PATCHED)
        rounded = run(settings, PERTURBED)
    found = list(verdicts(stock, patched, rounded))
    epoch, ok = (patched["epoch"] if dataset else None), all(x.is_explained for x in found)
    return Report(_title(settings, stock), found, costs(stock, patched), epoch, ok)


def run_in_process(settings: Settings, side: str) -> Run:
    """One run, in a process of its own, with its log in a file that is printed nowhere."""
    directory = Path(settings.directory)
    out, log = directory / f"{side}.pt", directory / f"{side}.log"
    arguments = directory / f"{side}.json"
    given = {"settings": dataclasses.asdict(settings), "side": side, "out": str(out)}
    arguments.write_text(json.dumps(given), encoding="utf-8")
    command = [sys.executable, "-m", "fastdpo.commands.check.side", str(arguments)]
    with log.open("wb") as stderr:
        code = subprocess.run(command, stdout=sys.stderr, stderr=stderr).returncode
    result: Run = torch.load(out, weights_only=True) if out.exists() else {"error": _last_line(log, code)}
    if "error" in result:
        raise ValueError(f"the run of {LABELS[side]} failed: {result['error']}")
    return result


def _last_line(log: Path, code: int) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit status {code}{f', {lines[-1]}' if lines else ''}"


def _require_trainer(trainer: str) -> None:
    (seam,) = patching.examine(trainer).seams
    if not seam.on:
        raise ValueError(f"{trainer} is off: {seam.reason}")
    newest, *_ = entries_of(trainer)
    is_newer = any(package.startswith("trl ") for package in seam.newer)
    if not (is_newer or newest.supports(seam.version)):
        raise ValueError(f"TRL {newest.versions} is required; got {seam.version}")


def _hide_progress_of_libraries() -> None:
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()


def _require_fields(settings: Settings) -> None:
    """Requires options that are fields of the trainer's configuration, and not those that a check sets itself."""
    own = own_fields(settings)
    for field in settings.fields:
        option = field.partition("=")[0]
        if option.startswith("--") and option.removeprefix("--").replace("-", "_") in own:
            raise ValueError(f"{option} is set by the check itself")
    parse_fields([f"--output_dir={settings.directory}", "--use_cpu=true", *settings.fields], settings.rewards)


def _title(settings: Settings, stock: Run) -> str:
    precision = stock["dtype"] if stock["autocast"] == "no" else f"{stock['dtype']}, autocast to {stock['autocast']}"
    adapter = " with a LoRA adapter" if settings.lora else ""
    trl = importlib.metadata.version("trl")
    size = f"{settings.batches} batches of {settings.batch_size} pairs"
    return f"{stock['model']}{adapter} in {precision}, {size}, TRL {trl}, torch {torch.__version__}"


def as_text(report: Report) -> str:
    """The report for a terminal."""
    names = [x.name for x in (*report.verdicts, *report.costs)]
    width = max(map(len, names))
    lines = [report.title, "rounding is measured by TRL with its layers rounded otherwise", ""]
    lines.append(f"{'':<7} {'relative difference':<{width}}  {'fastdpo':>8}  {'rounding':>8}  {'allowed':>8}")
    for x in report.verdicts:
        numbers = [f"{v:8.1e}" for v in (x.size, x.rounding, x.allowed) if v is not None]
        columns = [f"{_status(x):<7} {x.name:<{width}}", *numbers, *([x.detail] if x.detail else [])]
        lines.append("  ".join(columns).rstrip())
    lines += ["", f"{'':<7} {'cost':<{width}}  {'TRL':>12}  {'fastdpo':>12}  TRL / fastdpo"]
    for cost in report.costs:
        digits = 3 if cost.unit == "s" else 0
        sides = [f"{value:,.{digits}f} {cost.unit}".strip() for value in (cost.stock, cost.fastdpo)]
        lines.append(f"{'':<7} {cost.name:<{width}}  {sides[0]:>12}  {sides[1]:>12}  {cost.ratio:12.2f}x")
    if report.epoch is not None:
        pairs, counted, padded, packed, shared = (f"{n:,}" for n in report.epoch.values())
        sample = "" if counted == pairs else f" (estimated from {counted} pairs)"
        lines += ["", f"tokens of an epoch of {pairs} pairs, in each model{sample}:"]
        lines += [f"{padded} padded, {packed} packed, {shared} with shared beginnings"]
    return "\n".join([*lines, "", "fastdpo agrees with TRL" if report.ok else "fastdpo does not agree with TRL"])


def _status(x: Difference) -> str:
    return "ok" if x.is_explained else "failed"


def as_json(report: Report) -> str:
    fields: dict[str, Any] = report._asdict()
    fields["verdicts"] = [
        dict(name=x.name, fastdpo=x.size, stock=x.rounding, allowed=x.allowed, status=_status(x), detail=x.detail)
        for x in report.verdicts
    ]
    fields["costs"] = [{**x._asdict(), "ratio": x.ratio} for x in report.costs]
    return json.dumps(fields, indent=2)
