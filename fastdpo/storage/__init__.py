"""Directories of files that are written once, on a file system or on object storage.

`directory_at("cache")` is a local directory, `directory_at("s3://bucket/cache")` one that fsspec
reaches. A file in either is finished or does not exist for readers.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..plain_checks import checked_path
from .directory import Directory, invalid_file
from .local import LocalDirectory

__all__ = ["Directory", "LocalDirectory", "checked_directory", "directory_at", "invalid_file", "is_url"]


def is_url(location: str) -> bool:
    return "://" in location


def directory_at(location: str | os.PathLike[str]) -> Directory:
    """The directory with this path or URL, which need not exist.

    Raises:
        ValueError: fsspec does not know the URL's protocol.
        ImportError: the package for the protocol is not installed.
    """
    if isinstance(location, str) and is_url(location):
        from .remote import RemoteDirectory

        return RemoteDirectory.at(location)
    return LocalDirectory(Path(location))


def checked_directory(op: str, argument: str, value: object, rule: str) -> Directory:
    """The directory that a string or an `os.PathLike` names.

    Raises:
        TypeError, ValueError: it breaks the rule, or fsspec cannot reach it.
    """
    path = checked_path(op, argument, value, rule)
    if not isinstance(value, str) or not is_url(value):
        return LocalDirectory(path)
    try:
        return directory_at(value)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{op}: {argument} must {rule}; got {value!r}, which fsspec cannot reach: {error}") from error
