"""The option `padding_free` of TRL, which packing replaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_padding_free(owner: Any) -> Iterator[None]:
    """Disables `padding_free` of a trainer or a configuration during the block."""
    before, owner.padding_free = owner.padding_free, False
    try:
        yield
    finally:
        owner.padding_free = before
