"""Files that appear whole or not at all: written under a temporary name, flushed, and renamed.

While a file is being written, it is named `.<random name>.tmp` and locked by its writer. A temporary
file that is not locked was left by a process that was killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

try:
    import fcntl
except ModuleNotFoundError:
    fcntl = None

TEMPORARY = ".*.tmp"


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
        with _new_locked(path) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:  # Windows cannot rename an open file
                file.close()
            yield path
    finally:
        path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Deletes temporary files whose writers no longer run. Safe while other processes are writing."""
    for path in directory.glob(TEMPORARY):
        with suppress(OSError):
            if fcntl is None:
                path.unlink()  # fails on Windows while a writer has it open
                continue
            with path.open("r+b") as file:
                if _locked(file):
                    path.unlink()


def _new_locked(path: Path) -> IO[bytes]:
    """Creates a file and locks it if its file system has locks. Creates it again if another
    process's `remove_leftovers` came between.
    """
    while True:
        file = path.open("xb")
        _locked(file, wait=True)  # until the other process, if there is one, has deleted the file
        if path.exists():
            return file
        file.close()


def _locked(file: IO[bytes], wait: bool = False) -> bool:
    """Tries to lock an open file until it is closed. Returns whether that succeeded."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
