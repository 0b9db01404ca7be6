"""The estimate as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from .batches import LAYOUTS
from .prediction import SIDES, Estimate

GIB = 1 << 30
LABELS = {"padded": "padded (TRL)", "packed": "packed", "shared": "packed, prompts shared"}
SHARED = {
    **LABELS,
    "drawn": "shared in batches as drawn",
    "grouped": "shared with group_prompts",
    "tree": "shared by all pairs",
}
PARTS = {
    "weights": "weights",
    "reference_weights": "reference weights",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "activations": "activations",
    "head": "head",
    "reference": "reference run",
}


def as_json(estimate: Estimate) -> str:
    """All fields of the estimate, and `total` of every memory; bytes."""
    report = asdict(estimate)
    report["memory"] = {
        size: {side: step._asdict() | {"total": step.total} for side, step in sides.items()}
        for size, sides in estimate.memory.items()
    }
    return json.dumps(report, indent=2)


def as_text(estimate: Estimate) -> str:
    """Tables for a terminal."""
    of, largest = estimate.tokens, estimate.memory["largest"]
    tokens = [(LABELS[x], f"{of['median'][x]:,}", f"{of['largest'][x]:,}") for x in LAYOUTS]
    padded = estimate.epoch["padded"]
    epoch = [(label, f"{estimate.epoch[x]:,}", f"{estimate.epoch[x] / padded:.0%}") for x, label in SHARED.items()]
    memory = [(label, *(_gib(getattr(largest[side], name)) for side in SIDES)) for name, label in PARTS.items()]
    memory += [
        (f"peak, {size} batch", *(_gib(sides[side].total) for side in SIDES))
        for size, sides in reversed(estimate.memory.items())
    ]
    tables = [
        [(f"tokens a step, {estimate.batch} pairs", "median batch", "largest batch"), *tokens],
        [("tokens of an epoch", "tokens", "of padded"), *epoch],
        [("GiB, largest batch", *SIDES), *memory],
    ]
    if estimate.limit is not None:
        fits = tuple(f"{estimate.fits[side]:,}" for side in SIDES)
        tables.append([("largest batch size", *SIDES), (f"any pairs, in {_gib(estimate.limit)} GiB", *fits)])
    return "\n\n".join([f"{estimate.pairs:,} pairs", *map(_table, tables)])


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"
