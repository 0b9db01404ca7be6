"""When two sides are equal: each is judged by its error against float64, relative to what plain PyTorch errs.

`error <= 2 * error(plain PyTorch at the same dtype) + floor + slack`, the rule of `fastdpo.testing`. The slack is the
part of an error that the truth can derive from the errors allowed of other quantities; 0 if it names none.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import Arrays
from fastdpo.testing import error, floor

FLOOR = floor(torch.float32)


def judge(found: Arrays, truth: Arrays) -> list[dict[str, Any]]:
    """One entry a quantity that the truth knows: its relative error, the error allowed, and whether it is equal."""
    checks = []
    for key in truth:
        kind, _, quantity = key.partition("/")
        if kind != "exact":
            continue
        exact, plain = (torch.from_numpy(truth[f"{kind}/{quantity}"]) for kind in ("exact", "plain"))
        slack = float(truth.get(f"slack/{quantity}", 0.0))
        allowed = 2 * error(plain, exact) + FLOOR + slack
        if quantity not in found or found[quantity].shape != tuple(exact.shape):
            size = "missing" if quantity not in found else f"of shape {list(found[quantity].shape)}"
            checks.append({"quantity": f"{quantity} ({size})", "error": None, "allowed": allowed, "equal": False})
            continue
        of_side = error(torch.from_numpy(found[quantity]), exact)
        finite = of_side == of_side and of_side != float("inf")
        checks.append(
            {
                "quantity": quantity,
                "error": of_side if finite else None,
                "allowed": allowed,
                "equal": of_side <= allowed,
            }
        )
    return checks


def describe(checks: list[dict[str, Any]]) -> str:
    """The quantities that differ, by how much."""
    wrong = [check for check in checks if not check["equal"]]
    errors = ["NaN" if check["error"] is None else f"{check['error']:.1e}" for check in wrong]
    return "; ".join(
        f"{check['quantity']} off by {error} (allowed {check['allowed']:.1e})"
        for check, error in zip(wrong, errors, strict=True)
    )
