"""The files that store values: safetensors, written atomically, and used only after a check of
their contents.

    <cache directory>/<key>/<random name>.safetensors
        rows      int64 [n]    indices of rows of the dataset, each once
        chosen    float32 [n]  sums of log-probabilities in nats, finite
        rejected  float32 [n]
        metadata  key, and digest: the SHA-256 of the bytes of the three tensors

A file has a random name and one writer, and is never changed. If two files hold the same row, which
can happen after two runs of the same computation, the first by name counts. While a file is being
written, it is named `.<random name>.tmp` and locked by its writer. A temporary file that is not
locked was left by a process that was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import uuid4

import safetensors.torch
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor

from ..logs import logger, warn
from ..reasons import Reason

try:
    import fcntl
except ModuleNotFoundError:
    fcntl = None

SECONDS_BETWEEN_TRIES = 0.2
"""Interval at which a process tries to take a lock that another one holds."""

MISSING = -torch.inf
TEMPORARY = ".*.tmp"
DTYPES = {"rows": "I64", "chosen": "F32", "rejected": "F32"}


@dataclass(frozen=True)
class Shards:
    """The files of one key.

    Attributes:
        directory: the directory of this key.
        key: hash of everything that the values depend on.
        n_rows: number of rows of the dataset.
    """

    directory: Path
    key: str
    n_rows: int

    @contextmanager
    def lock(self, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Locks the directory, so that no two jobs compute the same. The lock ends with its
        process.

        Calls `waiting` after each failed attempt.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        lock, logged = FileLock(self.directory / ".lock"), False
        while not lock.is_locked:
            try:
                lock.acquire(blocking=False)
            except Timeout:
                if not logged:
                    holder = f"another process that computes them and holds {lock.lock_file}"
                    warn(f"reference log-probabilities: waiting for {holder}")
                logged = True
                waiting()
                time.sleep(SECONDS_BETWEEN_TRIES)
        try:
            remove_leftovers(self.directory)
            yield
        finally:
            lock.release()

    def read(self) -> Tensor:
        """The stored values of chosen and rejected completions, float32 [N, 2]; -inf where no file
        has the row.

        Raises:
            ValueError: a file cannot be read, or `write` has not written it for this key.
        """
        values = missing(self.n_rows)
        for _, rows, found in self._stored():
            new = values[rows, 0] == MISSING
            values[rows[new]] = found[new]
        return values

    def _stored(self) -> Iterator[tuple[Path, Tensor, Tensor]]:
        for path in files(self.directory):
            try:
                yield path, *self._load(path)
            except FileNotFoundError:
                continue  # merged into another file meanwhile

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Stores the values [n, 2] of these rows [n] in a new file."""
        tensors = {"rows": rows.long(), "chosen": values[:, 0].contiguous(), "rejected": values[:, 1].contiguous()}
        write_file(self.directory, self.key, tensors)  # the lock's holder may have another disk

    def merge(self, values: Tensor) -> None:
        """Replaces several files by one with all rows. The caller must hold the lock.

        Deletes only files that could be read.
        """
        if len(files(self.directory)) < 2:
            return
        stored = [(path, len(rows)) for path, rows, _ in self._stored()]
        complete = next((path for path, n in stored if n == self.n_rows), None)
        if complete is None:
            self.write(torch.arange(self.n_rows, device="cpu"), values)
        for path, _ in stored:
            if path != complete:
                path.unlink(missing_ok=True)

    def clean(self, values: Tensor) -> None:
        """Removes what killed processes left in a finished cache, unless
        another process holds the lock.
        """
        if len(files(self.directory)) < 2 and not any(self.directory.glob(TEMPORARY)):
            return
        try:
            with FileLock(self.directory / ".lock").acquire(blocking=False):
                remove_leftovers(self.directory)
                self.merge(values)
        except (Timeout, OSError, ValueError) as error:
            logger.debug("reference log-probabilities: %s was not cleaned up: %s", self.directory, error)

    def _load(self, path: Path) -> tuple[Tensor, Tensor]:
        rows, chosen, rejected = read_file(path, self.key, DTYPES).values()
        if len(rows) and (rows.min() < 0 or rows.max() >= self.n_rows):
            bounds = f"{int(rows.min())} to {int(rows.max())}"
            raise _invalid(path, f"hold rows from 0 to {self.n_rows - 1}", bounds)
        if len(rows.unique()) != len(rows):
            raise _invalid(path, "hold each row once", f"{len(rows) - len(rows.unique())} of {len(rows)} repeated")
        return rows, torch.stack([chosen, rejected], 1)


def files(directory: Path) -> list[Path]:
    """The files with values, sorted by name. None for a directory that
    does not exist or cannot be listed.
    """
    return sorted(directory.glob("*.safetensors"))


def unusable_reason(directory: Path) -> Reason | None:
    """Returns why files cannot be stored in a directory, or None if they
    can. Creates the directory if needed.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        next(directory.iterdir(), None)
        with _temporary(directory, bytes(4096)) as probe:
            probe.unlink()
    except OSError as error:
        return Reason("cache-directory", directory=directory, error=error)
    return None


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


def write_file(directory: Path, key: str, tensors: dict[str, Tensor]) -> None:
    """Writes a new file with a random name, atomically. Raises OSError if that fails."""
    data = safetensors.torch.save(tensors, {"key": key, "digest": _digest(tensors)})
    directory.mkdir(parents=True, exist_ok=True)
    with _temporary(directory, data) as temporary:
        temporary.replace(directory / f"{uuid4().hex}.safetensors")


@contextmanager
def _temporary(directory: Path, data: bytes) -> Iterator[Path]:
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


def read_file(path: Path, key: str, dtypes: dict[str, str]) -> dict[str, Tensor]:
    """Reads the tensors [n] with these names and dtypes from a file that `write_file` has written
    for this key.

    Raises:
        ValueError: the file was not written so, cannot be read, or has a value that is not finite.
        FileNotFoundError: the file does not exist any more.
    """
    data = _bytes(path)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise _invalid(path, "be a whole safetensors file", error) from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.pop("__metadata__", {})
    if metadata.get("key") != key:
        raise _invalid(path, f"have the key {key}", metadata.get("key"))
    actual = {name: entry["dtype"] for name, entry in header.items()}
    shapes = {tuple(entry["shape"]) for entry in header.values()}
    if actual != dtypes or len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise _invalid(path, f"hold {dtypes}, all of one length", f"{actual} of shapes {sorted(shapes)}")
    tensors = {name: tensors[name] for name in dtypes}
    finite = torch.stack([x.isfinite() for x in tensors.values()]).all(0)
    if not finite.all():
        raise _invalid(path, "hold finite values", f"another one at index {int((~finite).nonzero()[0])}")
    if metadata.get("digest") != _digest(tensors):
        raise _invalid(path, f"have the digest {_digest(tensors)} of its values", metadata.get("digest"))
    return tensors


def _bytes(path: Path) -> bytes:
    """The bytes of a regular file. Not memory-mapped: an I/O error would
    then kill the process with SIGBUS.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would block
            raise _invalid(path, "be a regular file", stat.filemode(path.stat().st_mode))
        return path.read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            raise
        raise _invalid(path, "be readable", error) from error


def missing(n_rows: int) -> Tensor:
    return torch.full((n_rows, 2), MISSING, device="cpu")


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for x in tensors.values():
        digest.update(x.numpy().data)
    return digest.hexdigest()


def _invalid(path: Path, rule: str, actual: object) -> ValueError:
    return ValueError(
        f"ref_logps: {path} must {rule}; got {actual}. Nothing of it is used. Delete it, so that its rows are "
        "computed again, or choose another cache directory"
    )
