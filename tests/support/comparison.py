"""Tiny models of the trainings that tests compare, and the rule that says when two trainings are the same.

Patched and stock training do the same arithmetic in another order. Most differ by less than `RELATIVE` and `ABSOLUTE`,
which is what rounding leaves of a well-conditioned float32 training. How much it leaves of another one depends on the
processor, its libraries and the training. It is measured there: the stock training is repeated in float64, and patched
and stock may differ by `FACTOR` times what stock differs from that. Over four families and four seeds, a patched
training is as far from float64 as stock is (median of the ratio: 1.0), 1.7 times as far at most in the first step, and
3.5 times in a later one, which multiplies what rounding has left of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import pytest
import torch

EPS = torch.finfo(torch.float32).eps
RELATIVE = 64 * EPS
"""Relative tolerance of logged numbers and of gradients: sums of some hundred products, added in another order."""
ABSOLUTE = 16 * EPS
"""Absolute tolerance of logged numbers: a reward is a tenth of the difference of two sums of some 30 nats."""
CANCELLED = 1e-7
"""Absolute tolerance of a gradient, for those that are zero in exact arithmetic, such as that of a bias of keys."""
FACTOR = 8
"""Stock and patched differ by at most this many times what stock differs from float64."""
LARGEST_SCALE = 1000
"""Largest factor between measured and assumed rounding. At a hundredth of a gradient, a wrong mask could be missed."""
DIGITS_OF_LOSSES = 4
"""After the point, in the logs of transformers 4 and of TRL's OnlineDPOTrainer."""

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
    tie_word_embeddings=False,
)


def sharpen(model: torch.nn.Module) -> None:
    """Draws weights anew: the usual 0.02 makes every attention uniform, and a wrong mask nearly right."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.2)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.1)


class Training(Protocol):
    """Logs and gradients of each step."""

    logs: Sequence[dict[str, float]]
    gradients: Sequence[dict[str, torch.Tensor]]


class Difference(NamedTuple):
    """Difference of one number or tensor of two trainings. Its size is 1 where it is just allowed."""

    size: float
    what: str


def assert_same_training(stock: Training, patched: Training, in_float64: Callable[[], Training] | None = None) -> None:
    """Every number of every log and every parameter's gradient of every step agree, but for rounding.

    `in_float64` repeats the stock training in float64. It is called only where the two differ by more than `RELATIVE`
    and `ABSOLUTE`. Without it, those are the bounds.
    """
    found = differences(stock, patched)
    if not all(each.size <= 1 for each in found) and in_float64 is not None:
        scales = scales_from(differences(stock, in_float64()))
    else:
        scales = [1.0] * len(found)
    for each, scale in zip(found, scales, strict=True):
        assert each.size <= scale, f"{each.what}: {each.size / scale:.3g} times what rounding may leave"


def assert_same_in_low_precision(
    stock: Training, patched: Training, dtype: torch.dtype, in_float64: Callable[[], Training]
) -> None:
    """Losses and gradients agree as far as two orders of summation in bfloat16 or float16 allow.

    Some 5 roundings lie between a weight and its gradient in two layers, in each of the two trainings: 10 units of
    rounding of the gradient's norm. A loss depends on margins, sums of some 10 log-probabilities of some 4 nats, times
    beta: 4 units. Where the two differ by more, patched may be twice as far from float64 as stock is.
    """
    unit = torch.finfo(dtype).eps / 2

    def distances(a: Training, b: Training) -> tuple[float, float]:
        assert [log.keys() for log in a.logs] == [log.keys() for log in b.logs]
        losses = [[{"loss": log["loss"]} for log in run.logs if "loss" in log] for run in (a, b)]
        return (
            largest(differences_of_logs(*losses, relative=0.0, absolute=4 * unit)).size,
            largest(differences_of_gradients(a.gradients, b.gradients, relative=10 * unit)).size,
        )

    if not all(distance <= 1 for distance in distances(stock, patched)):
        exact = in_float64()
        for of_patched, of_stock in zip(distances(exact, patched), distances(exact, stock), strict=True):
            assert of_patched <= max(1, 2 * of_stock)


def assert_far_from_same(stock: Training, sabotaged: Training, in_float64: Callable[[], Training]) -> None:
    """Some difference is ten times what may be. For tests of what the comparison notices."""
    found = differences(stock, sabotaged)
    scales = scales_from(differences(stock, in_float64()))
    furthest = max(each.size / scale for each, scale in zip(found, scales, strict=True))
    assert furthest >= 10, f"{furthest:.3g} times what rounding may leave"


def scales_from(rounding: Sequence[Difference]) -> list[float]:
    """How many times `RELATIVE` and `ABSOLUTE` two trainings may differ, from stock's differences to float64."""
    for each in rounding:
        assert FACTOR * each.size <= LARGEST_SCALE, f"ill-conditioned, or not the same training: {each}"
    return [max(1.0, FACTOR * each.size) for each in rounding]


def differences(stock: Training, other: Training) -> tuple[Difference, Difference]:
    """The largest difference of the logs, and that of the gradients."""
    logs = differences_of_logs(stock.logs, other.logs)
    return largest(logs), largest(differences_of_gradients(stock.gradients, other.gradients))


def largest(differences: Iterator[Difference]) -> Difference:
    """A difference that is not a number is the largest."""

    def size(each: Difference) -> float:
        return math.inf if math.isnan(each.size) else each.size

    return max(differences, key=size, default=Difference(0.0, "no difference"))


def differences_of_logs(
    stock: Sequence[dict], other: Sequence[dict], relative: float = RELATIVE, absolute: float = ABSOLUTE
) -> Iterator[Difference]:
    """Differences of every logged number. Losses that a trainer has rounded may lie on two sides of a half."""
    assert len(stock) == len(other) > 0
    for step, (a, b) in enumerate(zip(stock, other, strict=True)):
        assert a.keys() == b.keys(), f"step {step} logs other metrics"
        for name in a:
            rounded = "loss" in name and all(x == round(x, DIGITS_OF_LOSSES) for x in (a[name], b[name]))
            error = abs(a[name] - b[name]) - rounded * 1.01 * 10**-DIGITS_OF_LOSSES
            what = f"step {step}: {name} is {a[name]} and {b[name]}"
            yield Difference(error / (relative * abs(a[name]) + absolute), what)


def differences_of_gradients(
    stock: Sequence[dict], other: Sequence[dict], relative: float = RELATIVE
) -> Iterator[Difference]:
    """Differences of every parameter's gradient in every step."""
    for step, (a, b) in enumerate(zip(stock, other, strict=True)):
        assert a.keys() == b.keys(), f"step {step} has gradients of other parameters"
        for name in a:
            error, norm = (a[name].double() - b[name].double()).norm().item(), a[name].norm().item()
            what = f"step {step}: gradient of {name} differs by {error} of {norm}"
            yield Difference(error / (relative * norm + CANCELLED), what)


def approximately(expected: Any, units: float = 1) -> Any:
    """Equal to a logged number, or to all numbers of a container, but for rounding."""
    return pytest.approx(expected, rel=units * RELATIVE, abs=units * ABSOLUTE)


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, relative: float = RELATIVE, absolute: float = 8 * EPS
) -> None:
    """Log-probabilities, or sums of some, agree but for rounding."""
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)


def assert_same_gradients(stock: Sequence[dict], other: Sequence[dict]) -> None:
    """Every parameter's gradient of every step agrees, but for rounding."""
    assert len(stock) == len(other) > 0
    worst = largest(differences_of_gradients(stock, other))
    assert worst.size <= 1, worst.what


def assert_same_logs(stock: Sequence[dict], other: Sequence[dict]) -> None:
    """Every logged number agrees, but for rounding."""
    worst = largest(differences_of_logs(stock, other))
    assert worst.size <= 1, worst.what


def double(model: torch.nn.Module) -> torch.nn.Module:
    """The model in float64."""
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")  # the grouped one has no float64
    return model.double()
