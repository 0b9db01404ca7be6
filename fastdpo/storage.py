"""Directories of files that are written once, on a file system or on object storage.

`directory_at("cache")` is a local directory, `directory_at("s3://bucket/cache")` one that fsspec
reaches. A file in either is finished or does not exist for readers. It has a random name, and is never
changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast
from uuid import uuid4

from . import atomic_files
from .plain_checks import checked_path
from .reasons import Reason

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

SUFFIX = ".safetensors"
"""The end of the names of files. Other files are left alone."""

FILE = rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}"
ENTRY = re.compile(rf"({FILE})\.(\d+)\.([0-9a-f]{{64}})")
OWN = re.compile(rf"{FILE}.*|\.[0-9a-f]{{32}}\.tmp")


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
        TypeError, ValueError: it breaks the rule, or fsspec cannot reach it.
    """
    path = checked_path(op, argument, value, rule)
    try:
        return directory_at(value if isinstance(value, str) else path)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{op}: {argument} must {rule}; got {value!r}, which fsspec cannot reach: {error}") from error


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

    def remove_leftovers(self, all_stored: bool = False) -> None:
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

    Object storage has no atomic rename, so a file counts when its entry in the manifest exists, an empty
    object that is written after it:

        <32 hex digits>.safetensors                           the file
        <32 hex digits>.safetensors.<bytes>.<SHA-256>         its entry, with the file's size and digest

    The string of a file is its entry. The manifest is the listing of the directory. Nothing in it is ever
    rewritten, so any number of processes may add to it. It has no locks either: two processes that compute
    the same values at the same time both store them, and readers use the first file by name.

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
        names = self._listing()
        return sorted(name for name in names if (entry := ENTRY.fullmatch(name)) and entry[1] in names)

    def location(self, file: str) -> str:
        return f"{self}/{_parsed(file)[0]}"

    def size(self, file: str) -> int:
        return _parsed(file)[1]

    def read(self, file: str) -> bytes:
        """As that of `LocalDirectory`. Raises ValueError, too, if it is not what was written."""
        name, size, digest = _parsed(file)
        location = self.location(file)
        try:
            with _as_os_errors():
                data = cast(bytes, self.filesystem.cat_file(f"{self.path}/{name}"))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise invalid_file(location, "be readable", error) from error
        if len(data) != size:
            raise invalid_file(location, f"have the {size} bytes that its manifest entry names", f"{len(data)} bytes")
        if (actual := hashlib.sha256(data).hexdigest()) != digest:
            raise invalid_file(location, f"have the digest {digest} of its manifest entry", actual)
        return data

    def write(self, data: bytes) -> None:
        name = f"{uuid4().hex}{SUFFIX}"
        with _as_os_errors():
            self.filesystem.makedirs(self.path, exist_ok=True)
            self._put(name, data)
            self._put(f"{name}.{len(data)}.{hashlib.sha256(data).hexdigest()}", b"")

    def delete(self, file: str) -> None:
        for name in (file, _parsed(file)[0]):  # the entry first: without it, nobody looks for the file
            self._remove(name)

    def lock(self) -> AbstractContextManager[object]:
        """Without effect."""
        return nullcontext()

    def leftovers(self) -> list[str]:
        files = self.files()
        finished = {*files, *(_parsed(file)[0] for file in files)}
        return sorted(name for name in self._listing() if OWN.fullmatch(name) and name not in finished)

    def remove_leftovers(self, all_stored: bool = False) -> None:
        """Deletes unfinished files if all that the directory is for is in finished ones. Not before: storage
        does not tell whether their writers run.
        """
        for name in self.leftovers() if all_stored else ():
            with suppress(OSError):
                self._remove(name)

    def unusable_reason(self) -> Reason | None:
        probe = f".{uuid4().hex}.tmp"
        try:
            with _as_os_errors():
                self.filesystem.makedirs(self.path, exist_ok=True)
                self._put(probe, b"fastdpo")
                self.filesystem.ls(self.path)  # not before: object storage has no empty directories
            self._remove(probe)
        except OSError as error:
            return Reason("cache-directory", directory=self, error=error)
        return None

    def _listing(self) -> dict[str, str]:
        """What the directory has: names, and "file" or "directory". Nothing if it cannot be listed."""
        self.filesystem.invalidate_cache(self.path)  # other processes write to it
        try:
            with _as_os_errors():
                found = self.filesystem.ls(self.path, detail=True)
        except OSError:
            return {}
        return {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry["type"] for entry in found}

    def _put(self, name: str, data: bytes) -> None:
        self.filesystem.pipe_file(f"{self.path}/{name}", data)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError), _as_os_errors():
            self.filesystem.rm_file(f"{self.path}/{name}")


Directory = LocalDirectory | RemoteDirectory


def invalid_file(location: object, rule: str, actual: object) -> ValueError:
    return ValueError(
        f"ref_logps: {location} must {rule}; got {actual}. Nothing of it is used. Delete it, so that its rows are "
        "computed again, or choose another cache directory"
    )


def _parsed(entry: str) -> tuple[str, int, str]:
    """The name, size and digest of an entry's file."""
    name, size, digest = cast("re.Match[str]", ENTRY.fullmatch(entry)).groups()
    return name, int(size), digest


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
