"""A directory that fsspec reaches, such as a prefix of a bucket.

Object storage has no atomic rename, so a file counts when its entry in the manifest exists, an empty
object that is written after it:

    <32 hex digits>.safetensors                           the file
    <32 hex digits>.safetensors.<bytes>.<SHA-256>         its entry, with the file's size and digest

The manifest is the listing of the directory. Nothing in it is ever rewritten, so any number of
processes may add to it. It has no locks either: two processes that compute the same values at the
same time both store them, and readers use the first file by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from uuid import uuid4

from .directory import SUFFIX, Directory, invalid_file

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

FILE = rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}"
ENTRY = re.compile(rf"({FILE})\.(\d+)\.([0-9a-f]{{64}})")
OWN = re.compile(rf"{FILE}.*|\.[0-9a-f]{{32}}\.tmp")


@dataclass(frozen=True)
class RemoteDirectory(Directory):
    """A directory on object storage. The string that stands for a file is its entry.

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
        return nullcontext()

    def leftovers(self) -> list[str]:
        files = self.files()
        finished = {*files, *(_parsed(file)[0] for file in files)}
        return sorted(name for name in self._listing() if OWN.fullmatch(name) and name not in finished)

    def remove_leftovers(self, all_stored: bool = False) -> None:
        for name in self.leftovers() if all_stored else ():
            with suppress(OSError):
                self._remove(name)

    def try_out(self) -> None:
        probe = f".{uuid4().hex}.tmp"
        with _as_os_errors():
            self.filesystem.makedirs(self.path, exist_ok=True)
            self._put(probe, b"fastdpo")
            self.filesystem.ls(self.path)  # not before: object storage has no empty directories
        self._remove(probe)

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
