"""Compares the runs of `fastdpo check`: a verdict for each quantity that they have computed.

fastdpo may differ from stock by as much as two runs of stock that differ in their rounding only, times the factor of
`accuracy.run_bound`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...accuracy import Difference, run_difference
from ...models.examine.gradients import GROUPS

Run = dict[str, Any]
"""The result of `side.measure`."""

COUNTS = ("rewards/accuracies", "accuracy", "mean_token_accuracy")
"""Metrics that count comparisons, which rounding may flip."""


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
    tokens = Cost("tokens a batch", "", stock["tokens"], fastdpo["tokens"])
    memory = Cost("peak memory above the models", "MiB", stock["memory"] / 2**20, fastdpo["memory"] / 2**20)
    if stock["seconds"] is None:  # there are too few batches to tell
        return [tokens, memory]
    return [tokens, Cost("time a batch", "s", stock["seconds"], fastdpo["seconds"]), memory]


def verdicts(stock: Run, fastdpo: Run, rounded: Run) -> Iterator[Difference]:
    """The difference of each quantity over all batches, after that of whether every call is fused.

    Args:
        stock, fastdpo: the two sides.
        rounded: stock, rounded otherwise.
    """
    yield _fused(fastdpo)
    sides, unit = (fastdpo, stock, rounded), stock["unit"]
    for name in dict.fromkeys(name for run in sides for name in run["scores"]):
        yield run_difference(name, *(run["scores"].get(name) for run in sides), unit=unit)
    names = dict.fromkeys(name for log in stock["logs"] for name in log)
    for name in sorted(names, key=lambda name: (name != "loss", name)):
        label = name if name == "loss" else f"metric {name}"
        count = _count(stock, name) if name in COUNTS else None
        values = (_column(run, name) for run in sides)
        yield run_difference(label, *values, unit=unit, scale=_scale(stock, name), count=count)
    for group in (x for x in GROUPS if x in stock["gradients"]):
        yield run_difference(f"gradients: {group}", *(run["gradients"].get(group) for run in sides), unit=unit)


def _fused(fastdpo: Run) -> Difference:
    calls = fastdpo["calls"]
    stock = {name: n for name, n in calls.items() if not name.endswith(" fused")}
    detail = "; ".join([", ".join(f"{name} {n}" for name, n in stock.items()) or "no calls", *fastdpo["reasons"]])
    return Difference("every call is fused", detail="" if calls and not stock else detail)


def _column(run: Run, name: str) -> Tensor | None:
    values = [log[name] for log in run["logs"] if name in log]
    return torch.tensor(values, dtype=torch.float64, device="cpu") if values else None


def _scale(run: Run, name: str) -> Tensor:
    """The size of the numbers that a metric is computed from, [batches]. Rewards and losses are differences of
    log-probabilities of rows, or of what a reward model returns, and means of logits cancel.
    """
    value = cast(Tensor, _column(run, name))
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
