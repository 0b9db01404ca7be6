"""When two trainings on several ranks are the same training."""

from __future__ import annotations

from collections import Counter

import torch
from comparison import assert_same_gradients, assert_same_logs

ROUNDING = torch.finfo(torch.float32).eps
GRADIENTS = 64 * ROUNDING
"""Relative: sums of some hundred products, rounded in another order."""
LOGS = 16 * ROUNDING
"""Absolute: a reward is a tenth of the difference of two sums of some 30 nats."""
WEIGHTS = ROUNDING
"""Relative: a step of SGD is a hundredth of the gradient, and is rounded to the weight."""


def assert_same(stock: dict, patched: dict) -> None:
    """Every logged number, every gradient that an engine shows, and every weight at the end agree."""
    assert stock["steps"] == patched["steps"]
    assert len(stock["gradients"]) == len(patched["gradients"]) == stock["steps"]
    assert_same_logs(stock["logs"], patched["logs"], GRADIENTS, LOGS)
    assert_same_gradients(stock["gradients"], patched["gradients"], GRADIENTS)
    assert_same_weights(stock, patched)


def assert_same_weights(stock: dict, patched: dict) -> None:
    assert_same_gradients([stock["weights"]], [patched["weights"]], WEIGHTS)


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
