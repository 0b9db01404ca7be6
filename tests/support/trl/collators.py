"""Collators of TRL whose batches a test changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Editing:
    """The first base of a collator to whose batches `edit` is applied."""

    edit: Callable[[dict[str, Any]], Any]

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)  # pyright: ignore[reportAttributeAccessIssue]
        self.edit(batch)
        return batch
