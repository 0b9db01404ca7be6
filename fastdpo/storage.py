"""Files that are written once, in a directory of a file system.

A file has a random name and is never changed. It is written under a temporary name and then renamed (see
`atomic_files`), so that it is finished or does not exist for readers.
"""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

from . import atomic_files
from .atomic_files import remove_leftovers as remove_leftovers
from .checks import checked_path, require
from .reasons import Reason

SUFFIX = ".safetensors"
"""The end of the names of files. Other files are left alone."""


def checked_directory(op: str, argument: str, value: object, rule: str) -> Path:
    """The directory that a string or an `os.PathLike` names, which need not exist.

    Raises:
        TypeError, ValueError: it breaks the rule, is a URL, or is a file.
    """
    path = checked_path(op, argument, value, rule)
    # Not `path`, in which two slashes are one.
    is_url = isinstance(value, str) and "://" in value
    require(not is_url, op, argument, rule, f"{value!r}, a URL: mount the storage, or copy its files to a directory")
    is_file = os.path.exists(path) and not os.path.isdir(path)
    require(not is_file, op, argument, rule, f"{str(path)!r}, which is a file")
    return path


def files(directory: Path) -> list[Path]:
    """The finished files, sorted by name. None for a directory that does not exist or cannot be listed."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def read(path: Path) -> bytes:
    """The bytes of a file. Not memory-mapped: an I/O error would then kill the process with SIGBUS.

    Raises:
        ValueError: it cannot be read.
        FileNotFoundError: it does not exist any more.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise invalid_file(path, "be readable", error) from error


def write(directory: Path, data: bytes) -> None:
    """Writes a new file, atomically. Creates the directory if needed. Raises OSError if that fails."""
    atomic_files.write(directory / f"{uuid4().hex}{SUFFIX}", data)


def unusable_reason(directory: Path) -> Reason | None:
    """Returns why files cannot be stored here, or None if they can: creates the directory if needed, writes and
    deletes a file, and lists it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        next(directory.iterdir(), None)
        with atomic_files.temporary(directory, bytes(4096)) as probe:
            probe.unlink()
    except OSError as error:
        return Reason("cache-directory", directory=directory, error=error)
    return None


def invalid_file(path: Path, rule: str, actual: object) -> ValueError:
    return ValueError(
        f"ref_logps: {path} must {rule}; got {actual}. Nothing of it is used. Delete it, so that its rows are "
        "computed again, or choose another cache directory"
    )
