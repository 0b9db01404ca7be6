"""When two trainings on several ranks are the same training."""

from __future__ import annotations

from collections import Counter

from comparison import EPS, Difference, assert_same_gradients, assert_same_logs, differences_of_gradients, largest


def assert_same(stock: dict, patched: dict) -> None:
    """Every logged number, every gradient that an engine shows, and every weight at the end agree."""
    assert stock["steps"] == patched["steps"]
    assert len(stock["gradients"]) == len(patched["gradients"]) == stock["steps"]
    assert_same_logs(stock["logs"], patched["logs"])
    assert_same_gradients(stock["gradients"], patched["gradients"])
    assert_same_weights(stock, patched)


def assert_same_weights(stock: dict, patched: dict) -> None:
    worst = difference_of_weights(stock, patched)
    assert worst.size <= 1, worst.what


def difference_of_weights(stock: dict, patched: dict) -> Difference:
    """A step of SGD is a hundredth of the gradient, and is rounded to the weight."""
    return largest(differences_of_gradients([stock["weights"]], [patched["weights"]], relative=EPS))


def assert_calls(run: dict, batches: int, evaluated: int = 0, unpacked: int = 0, path: str = "stock") -> None:
    """That policy and reference were fused in each of so many batches, but for those that can't be packed."""
    assert run["calls"] == Counter(
        {
            ("policy", "fused"): batches - unpacked,
            ("policy", path): unpacked,
            ("reference", "fused"): batches + evaluated - unpacked,
            ("reference", path): unpacked,
            ("eval", "fused"): evaluated,
        }
    )
