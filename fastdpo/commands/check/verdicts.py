"""Compares the runs of `fastdpo check`: a verdict for each quantity that they have computed.

fastdpo may differ from stock by as much as two runs of stock that differ in their rounding only, times the factor of
`accuracy.run_bound`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...accuracy import error, run_bound
from ...models.examine import gradients

Run = dict[str, Any]
"""The result of `side.measure`."""

OK, FAILED = "ok", "failed"
COUNTS = ("rewards/accuracies", "accuracy", "mean_token_accuracy")
"""Metrics that count comparisons, which rounding may flip."""


class QuantityVerdict(NamedTuple):
    """One row of the report. Differences are relative, `||x - y|| / ||y||` over all batches.

    Attributes:
        name: what was compared.
        fastdpo: the difference that fastdpo makes; None if the row is no comparison of numbers.
        stock: the difference that rounding alone makes.
        allowed: the largest difference that passes.
        status: "ok" or "failed".
        detail: the reason of a failure, or "".
    """

    name: str
    fastdpo: float | None
    stock: float | None
    allowed: float | None
    status: str
    detail: str = ""


class Cost(NamedTuple):
    """What a batch or a run costs on each side."""

    name: str
    unit: str
    stock: float
    fastdpo: float

    @property
    def ratio(self) -> float:
        return self.stock / self.fastdpo if self.fastdpo else float("inf")


def costs(stock: Run, fastdpo: Run) -> list[Cost]:
    found = [
        Cost("tokens a batch", "", stock["tokens"], fastdpo["tokens"]),
        Cost("peak memory above the models", "MiB", stock["memory"] / 2**20, fastdpo["memory"] / 2**20),
    ]
    if stock["seconds"] is not None:  # else there are too few batches to tell
        found.insert(1, Cost("time a batch", "s", stock["seconds"], fastdpo["seconds"]))
    return found


def verdicts(stock: Run, fastdpo: Run, rounded: Run) -> list[QuantityVerdict]:
    """The verdict of each quantity.

    Args:
        stock, fastdpo: the two sides.
        rounded: stock, rounded otherwise.
    """
    return [_fused(fastdpo), *_compared(stock, fastdpo, rounded)]


def _fused(fastdpo: Run) -> QuantityVerdict:
    calls = fastdpo["calls"]
    stock = {name: n for name, n in calls.items() if not name.endswith(" fused")}
    if calls and not stock:
        return QuantityVerdict("every call is fused", None, None, None, OK)
    detail = "; ".join([", ".join(f"{name} {n}" for name, n in stock.items()) or "no calls", *fastdpo["reasons"]])
    return QuantityVerdict("every call is fused", None, None, None, FAILED, detail)


def _compared(stock: Run, fastdpo: Run, rounded: Run) -> Iterator[QuantityVerdict]:
    unit = stock["unit"]
    for name in dict.fromkeys(name for run in (stock, fastdpo, rounded) for name in run["scores"]):
        values = [run["scores"].get(name) for run in (stock, fastdpo, rounded)]
        yield _verdict(name, *values, unit=unit)
    names = dict.fromkeys(name for log in stock["logs"] for name in log)
    for name in sorted(names, key=lambda name: (name != "loss", name)):
        values = [_column(run, name) for run in (stock, fastdpo, rounded)]
        label = name if name == "loss" else f"metric {name}"
        floor = _count(stock, name) if name in COUNTS else None
        yield _verdict(label, *values, unit=unit, scale=_scale(stock, name), floor=floor)
    for group in gradients.GROUPS:
        if any(group in x for x in stock["gradients"]):
            values = [_sketches(run, group) for run in (stock, fastdpo, rounded)]
            yield _verdict(f"gradients: {group}", *values, unit=unit)


def _verdict(
    name: str,
    stock: Tensor | None,
    fastdpo: Tensor | None,
    rounded: Tensor | None,
    *,
    unit: float,
    scale: Tensor | None = None,
    floor: float | None = None,
) -> QuantityVerdict:
    """The verdict of values of any shape. With a floor, it is allowed next to the measured difference."""
    if stock is None or fastdpo is None or rounded is None or not stock.shape == fastdpo.shape == rounded.shape:
        shapes = [None if x is None else list(x.shape) for x in (stock, fastdpo)]
        return QuantityVerdict(name, None, None, None, FAILED, f"fastdpo has computed {shapes[1]}, stock {shapes[0]}")
    measured, found = (_difference(x, stock, scale) for x in (rounded, fastdpo))
    allowed = run_bound(measured, unit) if floor is None else 2 * measured + floor
    return QuantityVerdict(name, found, measured, allowed, OK if found <= allowed else FAILED)


def _difference(x: Tensor, base: Tensor, scale: Tensor | None) -> float:
    if scale is None:
        return error(x, base)
    size = float(scale.norm())
    difference = float((x - base).norm())
    return difference / size if size else difference


def _column(run: Run, name: str) -> Tensor | None:
    values = [log[name] for log in run["logs"] if name in log]
    return torch.tensor(values, dtype=torch.float64, device="cpu") if values else None


def _scale(run: Run, name: str) -> Tensor | None:
    """The size of the numbers that a metric is computed from, [batches]. Rewards and losses are differences of
    log-probabilities of rows, or of what a reward model returns, and means of logits cancel.
    """
    value = _column(run, name)
    if value is None:
        return None
    if name in COUNTS:
        return torch.ones_like(value)
    if name.startswith("logits/"):
        return value.abs() + 1
    if name in ("loss", "margin", "mean_reward") or name.startswith("rewards/"):
        rows = [_column(run, x) for x in ("logps/chosen", "logps/rejected", "min_reward", "max_reward")]
        return value.abs() + run["beta"] * sum(x.abs() for x in rows if x is not None)
    return value.abs()


def _count(run: Run, name: str) -> float:
    """The difference that one flipped comparison makes in one batch."""
    batches = len(run["logs"])
    is_of_pairs = name != "mean_token_accuracy"
    compared = run["pairs"] if is_of_pairs else len(run["scores"]["log-probabilities of the policy"]) / batches / 2
    return 1 / compared / batches**0.5


def _sketches(run: Run, group: str) -> Tensor:
    empty = torch.zeros(gradients.SIZE, dtype=torch.float64, device="cpu")
    return torch.cat([x.get(group, empty) for x in run["gradients"]])
