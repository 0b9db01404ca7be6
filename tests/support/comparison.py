"""Tolerances and assertions that compare two trainings, and the sizes of their tiny models.

Patched and stock training do the same arithmetic in a different order. Their float32 results
usually differ by less than `RELATIVE` and `ABSOLUTE`, the rounding error of a well-conditioned
training. The rounding error of an ill-conditioned training depends on the processor, its libraries
and the training itself, so it is measured: the stock training is repeated in float64, and patched
may differ from stock by `FACTOR` times the difference between stock and float64. Over four families
and four seeds, patched is as far from float64 as stock is (median ratio 1.0). The largest ratio is
1.7 in the first step and 3.5 in later steps, which amplify the rounding errors of earlier weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from transformers import AutoConfig

EPS = torch.finfo(torch.float32).eps
RELATIVE = 64 * EPS
"""Relative tolerance of a logged number or of a gradient's norm.

These are sums of about a hundred products, added in a different order.
"""
ABSOLUTE = 16 * EPS
"""Absolute tolerance of a logged number.

A reward is a tenth of the difference between two sums of about 30 nats.
"""
CANCELLED = 1e-7
"""Absolute tolerance of a gradient's norm.

Some gradients, such as that of a key bias, are zero in exact arithmetic.
"""
FACTOR = 8
"""Largest allowed ratio of the patched-stock difference to the stock-float64 difference."""
LARGEST_SCALE = 1000
"""Largest factor by which a measured rounding error may widen the tolerances.

With a larger one (a hundredth of a gradient), a wrong mask could go unnoticed.
"""
DIGITS_OF_LOSSES = 4
"""Number of decimals to which transformers 4 and TRL's OnlineDPOTrainer round logged losses."""

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
    """Draws larger random weights.

    With the usual standard deviation of 0.02 attention is nearly uniform, and a wrong mask is hard
    to notice.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.2)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.1)


def sizes_of(words: int) -> dict[str, Any]:
    """`SIZES` of a language model with a vocabulary."""
    return {**SIZES, "vocab_size": words, "head_dim": 8}


def drawn(auto: Any, kind: str, seed: int, **config: Any) -> Any:
    """A model of a type, by one of transformers' auto classes, with the random weights of a seed."""
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.for_model(kind, **config))
    sharpen(model)
    return model


def tiny(auto: Any, kind: str, words: int, seed: int = 0, without: tuple[str, ...] = (), **config: Any) -> Any:
    """`drawn` with `sizes_of` a vocabulary, without those of some names, and with entries of its configuration."""
    sizes = {name: size for name, size in sizes_of(words).items() if name not in without}
    return drawn(auto, kind, seed, **{**sizes, **config})


class Training(Protocol):
    """Any record of a training that has the logs and gradients of each step."""

    logs: Sequence[dict[str, float]]
    gradients: Sequence[dict[str, torch.Tensor]]


class Difference(NamedTuple):
    """The difference between two trainings in one number or tensor.

    Attributes:
        size: the difference divided by its tolerance.
        description: what differs, and by how much.
    """

    size: float
    description: str


def assert_same_training(stock: Training, patched: Training, in_float64: Callable[[], Training] | None = None) -> None:
    """Asserts that all logged numbers and all gradients of all steps agree up to rounding.

    `in_float64` repeats the stock training in float64. It is called only if the two trainings
    differ by more than `RELATIVE` and `ABSOLUTE`. Without it, those are the tolerances.
    """
    pair = differences(stock, patched)
    if not all(each.size <= 1 for each in pair) and in_float64 is not None:
        scales = scales_from(differences(stock, in_float64()))
    else:
        scales = [1.0] * len(pair)
    for each, scale in zip(pair, scales, strict=True):
        assert each.size <= scale, f"{each.description}: {each.size / scale:.3g} times the tolerance"


def assert_same(stock: Any, patched: Any) -> None:
    """Asserts that all logged numbers and all gradients of all steps agree up to rounding."""
    assert len(stock.gradients) == len(patched.gradients) == stock.steps == patched.steps
    assert_same_training(stock, patched, stock.in_float64)


def assert_same_bits(stock: Any, patched: Any) -> None:
    """Asserts that losses and gradients are bitwise equal.

    TRL's other metrics may differ by the rounding of their means.
    """
    assert largest(differences_of_logs(stock.logs, patched.logs, relative=8 * EPS, absolute=EPS)).size <= 1
    assert len(stock.gradients) == len(patched.gradients) == stock.steps == patched.steps
    for step, (a, b) in enumerate(zip(stock.logs, patched.logs, strict=True)):
        for name in a.keys() & {"loss", "eval_loss", "train_loss", "grad_norm"}:
            assert a[name] == b[name], f"step {step}: {name} {a[name]} {b[name]}"
    for step, (a, b) in enumerate(zip(stock.gradients, patched.gradients, strict=True)):
        assert a.keys() == b.keys(), f"step {step} has gradients of different parameters"
        for name in a:
            assert torch.equal(a[name], b[name]), f"step {step}: gradient of {name} differs"


def assert_fused(run: Any, **expected: int) -> None:
    """Asserts that exactly these calls ran, all of them fused.

    It shows that the fused path was not silently disabled.
    """
    assert run.calls == Counter({(kind, "fused"): n for kind, n in expected.items() if n})


def assert_trained_alike(
    runs: Sequence[Any],
    calls: Mapping[tuple[str, str], int] | None = None,
    *,
    same: Callable[[Any, Any], None] = assert_same,
    **fused: int,
) -> Any:
    """Asserts that a stock and a patched run are the same training, with these calls of the patched one, by role and
    path, or with these fused calls. Returns the patched run.
    """
    stock, patched = runs
    same(stock, patched)
    if calls is None:
        assert_fused(patched, **fused)
    else:
        assert patched.calls == calls
    return patched


def assert_same_in_low_precision(
    stock: Training, patched: Training, dtype: torch.dtype, in_float64: Callable[[], Training]
) -> None:
    """Asserts that losses and gradients agree up to rounding in bfloat16 or float16.

    In a model of two layers, about 5 roundings separate a weight from its gradient in each
    training: the tolerance is 10 units of rounding of the gradient's norm. A loss depends on beta
    times margins, which are sums of about 10 log-probabilities of about 4 nats: its tolerance is 4
    units. If the trainings differ by more, patched may be twice as far from float64 as stock is.
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
        pairs = zip(distances(exact, patched), distances(exact, stock), strict=True)
        for patched_distance, stock_distance in pairs:
            assert patched_distance <= max(1, 2 * stock_distance)


def assert_far_from_same(stock: Training, sabotaged: Training, in_float64: Callable[[], Training]) -> None:
    """Asserts that some difference is at least ten times its tolerance.

    Tests use it to show that the comparison notices an error.
    """
    pair = differences(stock, sabotaged)
    scales = scales_from(differences(stock, in_float64()))
    furthest = max(each.size / scale for each, scale in zip(pair, scales, strict=True))
    assert furthest >= 10, f"{furthest:.3g} times the tolerance"


def scales_from(rounding: Sequence[Difference]) -> list[float]:
    """Factors by which to widen the tolerances, from the differences between stock and float64."""
    for each in rounding:
        assert FACTOR * each.size <= LARGEST_SCALE, f"ill-conditioned, or a different training: {each}"
    return [max(1.0, FACTOR * each.size) for each in rounding]


def differences(stock: Training, other: Training) -> tuple[Difference, Difference]:
    """The largest difference between the logs, and the largest difference between the gradients."""
    logs = differences_of_logs(stock.logs, other.logs)
    return largest(logs), largest(differences_of_gradients(stock.gradients, other.gradients))


def largest(differences: Iterator[Difference]) -> Difference:
    """The largest of the differences. NaN counts as the largest."""

    def size(each: Difference) -> float:
        return math.inf if math.isnan(each.size) else each.size

    return max(differences, key=size, default=Difference(0.0, "no difference"))


def differences_of_logs(
    stock: Sequence[dict], other: Sequence[dict], relative: float = RELATIVE, absolute: float = ABSOLUTE
) -> Iterator[Difference]:
    """The difference in every logged number.

    Losses that a trainer has rounded may also differ by one unit of the last decimal.
    """
    assert len(stock) == len(other) > 0
    for step, (a, b) in enumerate(zip(stock, other, strict=True)):
        assert a.keys() == b.keys(), f"step {step} logs different metrics"
        for name in a:
            rounded = "loss" in name and all(x == round(x, DIGITS_OF_LOSSES) for x in (a[name], b[name]))
            error = abs(a[name] - b[name]) - rounded * 1.01 * 10**-DIGITS_OF_LOSSES
            description = f"step {step}: {name} is {a[name]} and {b[name]}"
            yield Difference(error / (relative * abs(a[name]) + absolute), description)


def differences_of_gradients(
    stock: Sequence[dict], other: Sequence[dict], relative: float = RELATIVE
) -> Iterator[Difference]:
    """The difference in the gradient of every parameter in every step."""
    for step, (a, b) in enumerate(zip(stock, other, strict=True)):
        assert a.keys() == b.keys(), f"step {step} has gradients of different parameters"
        for name in a:
            error, norm = (a[name].double() - b[name].double()).norm().item(), a[name].norm().item()
            description = f"step {step}: gradient of {name}, of norm {norm}, differs by {error}"
            yield Difference(error / (relative * norm + CANCELLED), description)


def approximately(expected: Any, units: float = 1) -> Any:
    """`pytest.approx` with the tolerances of logged numbers, for a number or a container."""
    return pytest.approx(expected, rel=units * RELATIVE, abs=units * ABSOLUTE)


def assert_close(
    result: torch.Tensor, expected: torch.Tensor, relative: float = RELATIVE, absolute: float = 8 * EPS
) -> None:
    """Asserts that log-probabilities, or sums of them, agree up to rounding."""
    torch.testing.assert_close(result, expected, rtol=relative, atol=absolute)


def assert_same_gradients(stock: Sequence[dict], other: Sequence[dict]) -> None:
    """Asserts that the gradients of all parameters in all steps agree up to rounding."""
    assert len(stock) == len(other) > 0
    worst = largest(differences_of_gradients(stock, other))
    assert worst.size <= 1, worst.description


def assert_same_logs(stock: Sequence[dict], other: Sequence[dict]) -> None:
    """Asserts that all logged numbers agree up to rounding."""
    worst = largest(differences_of_logs(stock, other))
    assert worst.size <= 1, worst.description


def double(model: torch.nn.Module) -> torch.nn.Module:
    """Converts a model to float64."""
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")  # the grouped implementation has no float64
    return model.double()
