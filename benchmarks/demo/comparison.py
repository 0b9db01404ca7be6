"""Compares two sides: differences of their losses and margins, and their costs."""

from statistics import median
from typing import Any, NamedTuple

from fastdpo.commands.check.comparison import Cost

Measurements = dict[str, Any]
"""The JSON that a side writes."""
LOSS_TOLERANCE = 1e-4


class Comparison(NamedTuple):
    """Largest differences over all steps, and costs."""

    loss_difference: float
    loss_relative_difference: float
    margin_difference: float
    costs: list[Cost]

    @property
    def same_loss(self) -> bool:
        """Whether the losses agree. False if a loss is NaN."""
        return self.loss_relative_difference <= LOSS_TOLERANCE


def column(side: Measurements, name: str) -> list[float]:
    """A measured quantity of every step."""
    return [step[name] for step in side["steps"]]


def tokens(side: Measurements) -> list[float]:
    """Tokens of every step that passed through the backbones of policy and reference."""
    return [a + b for a, b in zip(column(side, "policy_tokens"), column(side, "reference_tokens"), strict=True)]


def warm(values: list[float]) -> list[float]:
    """The values without the first one, which includes warm-up."""
    return values[1:] or values


def largest(values: list[float]) -> float:
    """The maximum; NaN if any value is NaN."""
    return max(values, key=lambda value: float("inf") if value != value else value)


def compare(stock: Measurements, fastdpo: Measurements) -> Comparison:
    losses = list(zip(column(stock, "loss"), column(fastdpo, "loss"), strict=True))
    margins = zip(column(stock, "margin"), column(fastdpo, "margin"), strict=True)
    sides = stock, fastdpo
    costs = [
        Cost("one step", "s", *(median(warm(column(side, "seconds"))) for side in sides)),
        Cost("training_step only", "s", *(median(warm(column(side, "training_step_seconds"))) for side in sides)),
        Cost("tokens per step", "", *(sum(tokens(side)) / len(tokens(side)) for side in sides)),
        Cost("peak memory above the models", "MiB", *(side["peak_memory_bytes"] / 2**20 for side in sides)),
    ]
    return Comparison(
        loss_difference=largest([abs(a - b) for a, b in losses]),
        loss_relative_difference=largest([abs(a - b) / (abs(a) or 1.0) for a, b in losses]),
        margin_difference=largest([abs(a - b) for a, b in margins]),
        costs=costs,
    )
