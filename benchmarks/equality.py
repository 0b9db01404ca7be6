"""Whether the numbers of a side are correct.

The error of a side against float64 must satisfy

    error(side) <= 2 * error(plain PyTorch at the same dtype) + floor + slack

The slack of a quantity is the part of its error that follows from the errors allowed in other
quantities. The ground truth provides it; it is 0 by default.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import Arrays
from fastdpo.accuracy import error, floor

FLOAT32_FLOOR = floor(torch.float32)


def compare_to_truth(arrays: Arrays, truth: Arrays) -> list[dict[str, Any]]:
    """Compares each quantity of the ground truth.

    An entry holds the relative error, the allowed error, and whether the quantity is equal. The
    error is None if it is not finite or if the quantity is missing.
    """
    checks = []
    for key in truth:
        kind, _, quantity = key.partition("/")
        if kind != "exact":
            continue
        exact, plain = (torch.from_numpy(truth[f"{kind}/{quantity}"]) for kind in ("exact", "plain"))
        slack = float(truth.get(f"slack/{quantity}", 0.0))
        allowed = 2 * error(plain, exact) + FLOAT32_FLOOR + slack
        if quantity not in arrays or arrays[quantity].shape != tuple(exact.shape):
            problem = "missing" if quantity not in arrays else f"of shape {list(arrays[quantity].shape)}"
            checks.append({"quantity": f"{quantity} ({problem})", "error": None, "allowed": allowed, "equal": False})
            continue
        side_error = error(torch.from_numpy(arrays[quantity]), exact)
        is_finite = side_error == side_error and side_error != float("inf")
        checks.append(
            {
                "quantity": quantity,
                "error": side_error if is_finite else None,
                "allowed": allowed,
                "equal": side_error <= allowed,
            }
        )
    return checks


def describe_failures(checks: list[dict[str, Any]]) -> str:
    """The quantities that differ from the ground truth, with their errors."""
    failures = []
    for check in checks:
        if not check["equal"]:
            shown = "NaN" if check["error"] is None else f"{check['error']:.1e}"
            failures.append(f"{check['quantity']}: error {shown} (allowed {check['allowed']:.1e})")
    return "; ".join(failures)
