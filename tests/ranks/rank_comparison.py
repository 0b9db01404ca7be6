"""Assertions that two trainings on several ranks are the same training."""

from __future__ import annotations

from collections import Counter

from tests.support.comparison import (
    EPS,
    Difference,
    assert_same_gradients,
    assert_same_logs,
    differences_of_gradients,
    largest,
)


def assert_same(stock: dict, patched: dict) -> None:
    """Asserts that logged numbers, gradients that the engine exposes, and final weights agree."""
    assert stock["steps"] == patched["steps"]
    assert len(stock["gradients"]) == len(patched["gradients"]) == stock["steps"]
    assert_same_logs(stock["logs"], patched["logs"])
    assert_same_gradients(stock["gradients"], patched["gradients"])
    assert_same_weights(stock, patched)


def assert_trained_alike(ranks: list[dict]) -> list[dict]:
    """Asserts that each rank trains as stock, and returns the patched trainings of all."""
    for rank in ranks:
        assert_same(rank["stock"], rank["patched"])
    return [rank["patched"] for rank in ranks]


def assert_same_weights(stock: dict, patched: dict) -> None:
    worst = difference_of_weights(stock, patched)
    assert worst.size <= 1, worst.description


def difference_of_weights(stock: dict, patched: dict) -> Difference:
    """The largest difference between the final weights, with the float32 epsilon as tolerance.

    An SGD step is a hundredth of the gradient, and its sum with the weight is rounded.
    """
    return largest(differences_of_gradients([stock["weights"]], [patched["weights"]], relative=EPS))


def assert_calls(run: dict, batches: int, evaluated: int = 0, unpacked: int = 0, path: str = "stock") -> None:
    """Asserts the number of calls on each path.

    Policy and reference are fused in all `batches` except `unpacked` of them, which take `path`.
    """
    assert run["calls"] == Counter(
        {
            ("policy", "fused"): batches - unpacked,
            ("policy", path): unpacked,
            ("reference", "fused"): batches + evaluated - unpacked,
            ("reference", path): unpacked,
            ("eval", "fused"): evaluated,
        }
    )
