"""Directories of files that are written once, on a file system or on object storage.

`directory_at("cache")` is a local directory, `directory_at("s3://bucket/cache")` one that fsspec
reaches. A file in either has a random name and is never changed. It is written under a temporary name and
then moved to its own (see `atomic_files`), so that it is finished or does not exist for readers.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, cast
from uuid import uuid4

from . import atomic_files
from .plain_checks import checked_path, require
from .reasons import Reason

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SUFFIX = ".safetensors"
"""The end of the names of files. Other files are left alone."""


def is_url(location: str) -> bool:
    return "://" in location


def directory_at(location: str | os.PathLike[str]) -> Directory:
    """The directory with this path or URL, which need not exist.

    Raises:
        ValueError: fsspec does not know the URL's protocol.
        ImportError: the package for the protocol is not installed.
    """
    if isinstance(location, str) and is_url(location):
        return RemoteDirectory.at(location)
    return LocalDirectory(Path(location))


def checked_directory(op: str, argument: str, value: object, rule: str) -> Directory:
    """The directory that a string or an `os.PathLike` names.

    Raises:
        TypeError, ValueError: it breaks the rule, is a file, or fsspec cannot reach it.
    """
    path = checked_path(op, argument, value, rule)
    try:
        directory = directory_at(value if isinstance(value, str) else path)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{op}: {argument} must {rule}; got {value!r}, which fsspec cannot reach: {error}") from error
    is_file = isinstance(directory, LocalDirectory) and os.path.exists(path) and not os.path.isdir(path)
    require(not is_file, op, argument, rule, f"{str(path)!r}, which is a file")
    return directory


@dataclass(frozen=True)
class LocalDirectory:
    """A directory of a file system. Files are renamed into it.

    Its string is the path that messages name. A file's string is its name.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> LocalDirectory:
        """The directory of this name inside this one. Neither need exist."""
        return LocalDirectory(self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    def directories(self) -> Sequence[LocalDirectory]:
        """The directories inside this one, sorted by name."""
        return [LocalDirectory(path) for path in sorted(self.path.glob("*")) if path.is_dir()]

    def files(self) -> list[str]:
        """The finished files, sorted by name. None for a directory that does not exist or cannot be
        listed.
        """
        return sorted(path.name for path in self.path.glob(f"*{SUFFIX}"))

    def location(self, file: str) -> str:
        """The path of a file, which a user can delete."""
        return str(self.path / file)

    def size(self, file: str) -> int:
        """The number of bytes of a file."""
        return (self.path / file).stat().st_size

    def read(self, file: str) -> bytes:
        """The bytes of a file. Not memory-mapped: an I/O error would then kill the process with SIGBUS.

        Raises:
            ValueError: it cannot be read.
            FileNotFoundError: it does not exist any more.
        """
        path = self.path / file
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would block
                raise invalid_file(path, "be a regular file", stat.filemode(path.stat().st_mode))
            return path.read_bytes()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not path.is_symlink():
                raise
            raise invalid_file(path, "be readable", error) from error

    def write(self, data: bytes) -> None:
        """Writes a new file, atomically. Creates the directory if needed. Raises OSError if that
        fails.
        """
        atomic_files.write(self.path / f"{uuid4().hex}{SUFFIX}", data)

    def delete(self, file: str) -> None:
        """Deletes a file, if it still exists. Raises OSError if that fails."""
        (self.path / file).unlink(missing_ok=True)

    def lock(self) -> AbstractContextManager[object]:
        """Creates the directory if needed, and locks it until the end of the block or of the process.

        Raises:
            filelock.Timeout: another process holds the lock.
            OSError, NotImplementedError: locks do not work here.
        """
        from filelock import FileLock

        self.path.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path / ".lock").acquire(blocking=False)

    def leftovers(self) -> list[str]:
        """The names of unfinished files, which are being written, or whose writer was killed."""
        return sorted(path.name for path in self.path.glob(atomic_files.TEMPORARY))

    def remove_leftovers(self) -> None:
        """Deletes unfinished files whose writers no longer run."""
        atomic_files.remove_leftovers(self.path)

    def unusable_reason(self) -> Reason | None:
        """Returns why files cannot be stored here, or None if they can: creates the directory if needed,
        writes and deletes a file, and lists it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            next(self.path.iterdir(), None)
            with atomic_files.temporary(self.path, bytes(4096)) as probe:
                probe.unlink()
        except OSError as error:
            return Reason("cache-directory", directory=self, error=error)
        return None


@dataclass(frozen=True)
class RemoteDirectory:
    """A directory that fsspec reaches, such as a prefix of a bucket, with the methods of `LocalDirectory`.

    Object storage has no locks: two processes that compute the same values at the same time both store them, and
    readers use the first file by name. To move a file is to copy it there, and the copy appears whole.

    Attributes:
        filesystem: that has it.
        path: without the protocol.
    """

    filesystem: AbstractFileSystem
    path: str

    @classmethod
    def at(cls, url: str) -> RemoteDirectory:
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(url)
        return cls(filesystem, path.rstrip("/"))

    def __str__(self) -> str:
        return self.filesystem.unstrip_protocol(self.path)

    def __truediv__(self, name: str) -> RemoteDirectory:
        return RemoteDirectory(self.filesystem, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    def directories(self) -> Sequence[RemoteDirectory]:
        return [self / name for name, kind in sorted(self._listing().items()) if kind == "directory"]

    def files(self) -> list[str]:
        return sorted(name for name in self._listing() if name.endswith(SUFFIX))

    def location(self, file: str) -> str:
        return f"{self}/{file}"

    def size(self, file: str) -> int:
        with _as_os_errors():
            return int(self.filesystem.size(f"{self.path}/{file}") or 0)

    def read(self, file: str) -> bytes:
        try:
            with _as_os_errors():
                return cast(bytes, self.filesystem.cat_file(f"{self.path}/{file}"))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise invalid_file(self.location(file), "be readable", error) from error

    def write(self, data: bytes) -> None:
        with self._temporary(data) as written, _as_os_errors():
            self.filesystem.mv(written, f"{self.path}/{uuid4().hex}{SUFFIX}")

    def delete(self, file: str) -> None:
        with suppress(FileNotFoundError), _as_os_errors():
            self.filesystem.rm_file(f"{self.path}/{file}")

    def lock(self) -> AbstractContextManager[object]:
        """Without effect."""
        return nullcontext()

    def leftovers(self) -> list[str]:
        return sorted(name for name in self._listing() if fnmatch(name, atomic_files.TEMPORARY))

    def remove_leftovers(self) -> None:
        for name in self.leftovers():
            with suppress(OSError), _as_os_errors():
                age = datetime.now(UTC) - self.filesystem.modified(f"{self.path}/{name}")
                if age.total_seconds() > atomic_files.ABANDONED_AFTER:
                    self.delete(name)

    def unusable_reason(self) -> Reason | None:
        try:
            with self._temporary(b"fastdpo"), _as_os_errors():
                self.filesystem.ls(self.path)  # not before: object storage has no empty directories
        except OSError as error:
            return Reason("cache-directory", directory=self, error=error)
        return None

    @contextmanager
    def _temporary(self, data: bytes) -> Iterator[str]:
        """Writes a temporary file, and yields its path. Deletes it after the block unless it was moved."""
        name = atomic_files.temporary_name()
        try:
            with _as_os_errors():
                self.filesystem.makedirs(self.path, exist_ok=True)
                self.filesystem.pipe_file(f"{self.path}/{name}", data)
            yield f"{self.path}/{name}"
        finally:
            self.delete(name)

    def _listing(self) -> dict[str, str]:
        """What the directory has: names, and "file" or "directory". Nothing if it cannot be listed."""
        self.filesystem.invalidate_cache(self.path)  # other processes write to it
        try:
            with _as_os_errors():
                found = self.filesystem.ls(self.path, detail=True)
        except OSError:
            return {}
        return {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry["type"] for entry in found}


Directory = LocalDirectory | RemoteDirectory


def invalid_file(location: object, rule: str, actual: object) -> ValueError:
    return ValueError(
        f"ref_logps: {location} must {rule}; got {actual}. Nothing of it is used. Delete it, so that its rows are "
        "computed again, or choose another cache directory"
    )


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raises OSError for the errors of file systems that have exceptions of their own, such as of
    missing credentials.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
