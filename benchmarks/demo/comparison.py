"""Lays the two sides next to each other: how far the numbers are apart, and what each side spent."""

from statistics import median
from typing import Any, NamedTuple

Side = dict[str, Any]
LOSS_TOLERANCE = 1e-4


class Cost(NamedTuple):
    """One thing that training costs, as each side measured it."""

    name: str
    unit: str
    stock: float
    fastdpo: float

    @property
    def ratio(self) -> float:
        return self.stock / self.fastdpo if self.fastdpo else float("inf")


class Comparison(NamedTuple):
    """The largest differences over all steps, and the costs."""

    loss_difference: float
    loss_relative_difference: float
    margin_difference: float
    costs: list[Cost]

    @property
    def same_loss(self) -> bool:
        """False also where a loss is NaN."""
        return self.loss_relative_difference <= LOSS_TOLERANCE


def column(side: Side, name: str) -> list[float]:
    """One measured quantity, step by step."""
    return [step[name] for step in side["steps"]]


def tokens(side: Side) -> list[float]:
    """Tokens that the backbones of policy and reference computed, step by step."""
    return [a + b for a, b in zip(column(side, "policy_tokens"), column(side, "reference_tokens"), strict=True)]


def warm(values: list[float]) -> list[float]:
    """All steps but the first, which also warms up."""
    return values[1:] or values


def largest(values: list[float]) -> float:
    """The maximum, or NaN if any value is."""
    return max(values, key=lambda value: float("inf") if value != value else value)


def compare(stock: Side, fastdpo: Side) -> Comparison:
    losses = list(zip(column(stock, "loss"), column(fastdpo, "loss"), strict=True))
    margins = zip(column(stock, "margin"), column(fastdpo, "margin"), strict=True)
    sides = stock, fastdpo
    costs = [
        Cost("one step", "s", *(median(warm(column(side, "seconds"))) for side in sides)),
        Cost("training_step alone", "s", *(median(warm(column(side, "training_step_seconds"))) for side in sides)),
        Cost("tokens computed a step", "", *(sum(tokens(side)) / len(tokens(side)) for side in sides)),
        Cost("peak memory above the models", "MiB", *(side["peak_memory_bytes"] / 2**20 for side in sides)),
    ]
    return Comparison(
        loss_difference=largest([abs(a - b) for a, b in losses]),
        loss_relative_difference=largest([abs(a - b) / (abs(a) or 1.0) for a, b in losses]),
        margin_difference=largest([abs(a - b) for a, b in margins]),
        costs=costs,
    )
