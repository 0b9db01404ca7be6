"""A directory of a file system. Files are renamed into it."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from .. import atomic_files
from .directory import SUFFIX, Directory, invalid_file


@dataclass(frozen=True)
class LocalDirectory(Directory):
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> LocalDirectory:
        return LocalDirectory(self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    def directories(self) -> Sequence[LocalDirectory]:
        return [LocalDirectory(path) for path in sorted(self.path.glob("*")) if path.is_dir()]

    def files(self) -> list[str]:
        return sorted(path.name for path in self.path.glob(f"*{SUFFIX}"))

    def location(self, file: str) -> str:
        return str(self.path / file)

    def size(self, file: str) -> int:
        return (self.path / file).stat().st_size

    def read(self, file: str) -> bytes:
        """Not memory-mapped: an I/O error would then kill the process with SIGBUS."""
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
        atomic_files.write(self.path / f"{uuid4().hex}{SUFFIX}", data)

    def delete(self, file: str) -> None:
        (self.path / file).unlink(missing_ok=True)

    def lock(self) -> AbstractContextManager[object]:
        from filelock import FileLock

        self.path.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path / ".lock").acquire(blocking=False)

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.path.glob(atomic_files.TEMPORARY))

    def remove_leftovers(self, all_stored: bool = False) -> None:
        atomic_files.remove_leftovers(self.path)

    def try_out(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        next(self.path.iterdir(), None)
        with atomic_files.temporary(self.path, bytes(4096)) as probe:
            probe.unlink()
