"""Files that appear whole or not at all: written under a temporary name, flushed, and renamed.

While a file is being written, it is named `.<random name>.tmp`. A temporary file that is older than an hour was left
by a process that was killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

TEMPORARY = ".*.tmp"

ABANDONED_AFTER = 3600
"""Seconds after which a temporary file has no writer any more."""


def write(path: Path, data: bytes) -> None:
    """Creates or replaces a file, and its directory if needed. Raises OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary(path.parent, data) as written:
        written.replace(path)


@contextmanager
def temporary(directory: Path, data: bytes) -> Iterator[Path]:
    """Writes a temporary file and flushes it to the disk. Deletes it
    after the block unless it was renamed.
    """
    path = directory / f".{uuid4().hex}.tmp"
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Deletes temporary files whose writers no longer run. Safe while other processes are writing."""
    for path in directory.glob(TEMPORARY):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER:
                path.unlink()
