"""The files that values are kept in: safetensors, written whole or not at all, believed only after a look at all of it.

    <cache directory>/<key>/<random name>.safetensors
        rows      int64 [n]    row numbers of the data set, each once
        chosen    float32 [n]  sums of log-probabilities in nats, finite
        rejected  float32 [n]
        metadata  key, and digest: the sha256 of the bytes of the three

A file is named by chance, has one writer, and is never changed. If two hold the same row, which can only be after two
runs of the same computation, the first by name counts. While it is being written, a file is named `.<random name>.tmp`
and locked by its writer. A temporary file that is not locked was left behind by a process that was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
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

try:
    import fcntl
except ModuleNotFoundError:
    fcntl = None

logger = logging.getLogger("fastdpo")

SECONDS_BETWEEN_TRIES = 0.2
"""Of taking a lock that another process holds."""

MISSING = -torch.inf
TEMPORARY = ".*.tmp"
DTYPES = {"rows": "I64", "chosen": "F32", "rejected": "F32"}


@dataclass(frozen=True)
class Shards:
    """The files of one key.

    Attributes:
        directory: of this key alone.
        key: what the values are of.
        n_rows: of the data set.
    """

    directory: Path
    key: str
    n_rows: int

    @contextmanager
    def lock(self, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Held by one job at a time, so that no two compute the same. Ends with its process, however that ends.

        `waiting` is called after each failed attempt.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        lock, logged = FileLock(self.directory / ".lock"), False
        while not lock.is_locked:
            try:
                lock.acquire(blocking=False)
            except Timeout:
                if not logged:
                    logger.warning(
                        "reference log-probabilities: waiting for another process that computes the same "
                        "ones, and holds %s",
                        lock.lock_file,
                    )
                logged = True
                waiting()
                time.sleep(SECONDS_BETWEEN_TRIES)
        try:
            remove_leftovers(self.directory)
            yield
        finally:
            lock.release()

    def read(self) -> Tensor:
        """float32 [N, 2], chosen and rejected of each row; -inf where no file has it.

        Raises:
            ValueError: a file can't be read, or is not one that `write` has made for this key.
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
                continue  # merged with others meanwhile

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Adds the values [n, 2] of these rows [n]."""
        tensors = {"rows": rows.long(), "chosen": values[:, 0].contiguous(), "rejected": values[:, 1].contiguous()}
        write_file(self.directory, self.key, tensors)  # the lock's holder may have another disk

    def merge(self, values: Tensor) -> None:
        """Replaces several files by one with all rows. The caller must hold the lock.

        Only files that could be read are deleted.
        """
        if len(files(self.directory)) < 2:
            return
        stored = [(path, len(rows)) for path, rows, _ in self._stored()]
        complete = next((path for path, n in stored if n == self.n_rows), None)
        if complete is None:
            self.write(torch.arange(self.n_rows), values)
        for path, _ in stored:
            if path != complete:
                path.unlink(missing_ok=True)

    def clean(self, values: Tensor) -> None:
        """Removes what killed processes left in a finished cache, unless another process holds the lock."""
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
            raise _refused(path, f"hold rows from 0 to {self.n_rows - 1}", bounds)
        if len(rows.unique()) != len(rows):
            raise _refused(path, "hold each row once", f"{len(rows) - len(rows.unique())} of {len(rows)} repeated")
        return rows, torch.stack([chosen, rejected], 1)


def files(directory: Path) -> list[Path]:
    """The files that hold values, sorted by name. Empty for a directory that does not exist or can't be listed."""
    return sorted(directory.glob("*.safetensors"))


def unusable_reason(directory: Path) -> str | None:
    """Returns why files can't be stored in a directory, or None if they can. Creates the directory if needed."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        next(directory.iterdir(), None)
        with _temporary(directory, bytes(4096)) as probe:
            probe.unlink()
    except OSError as error:
        return f"{directory} is not writable: {error}"
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
    """A new file, by a random name, whole or not at all. OSError if that fails."""
    data = safetensors.torch.save(tensors, {"key": key, "digest": _digest(tensors)})
    directory.mkdir(parents=True, exist_ok=True)
    with _temporary(directory, data) as temporary:
        temporary.replace(directory / f"{uuid4().hex}.safetensors")


@contextmanager
def _temporary(directory: Path, data: bytes) -> Iterator[Path]:
    """A temporary file with these bytes, flushed to the disk. Deleted after the block unless it was renamed."""
    path = directory / f".{uuid4().hex}.tmp"
    try:
        with path.open("xb") as file:
            _locked(file)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:  # Windows can't rename an open file
                file.close()
            yield path
    finally:
        path.unlink(missing_ok=True)


def _locked(file: IO[bytes]) -> bool:
    """Tries to lock an open file until it is closed. Returns whether that succeeded."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def read_file(path: Path, key: str, dtypes: dict[str, str]) -> dict[str, Tensor]:
    """The tensors [n] of these names and dtypes, in their order, if the file is what `write_file` makes of them.

    Raises:
        ValueError: it is not, it can't be read, or a value is not finite.
        FileNotFoundError: it is not there any more.
    """
    data = _bytes(path)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise _refused(path, "be a whole safetensors file", error) from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.pop("__metadata__", {})
    if metadata.get("key") != key:
        raise _refused(path, f"have the key {key}", metadata.get("key"))
    found = {name: entry["dtype"] for name, entry in header.items()}
    shapes = {tuple(entry["shape"]) for entry in header.values()}
    if found != dtypes or len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise _refused(path, f"hold {dtypes}, all of one length", f"{found} of shapes {sorted(shapes)}")
    tensors = {name: tensors[name] for name in dtypes}
    finite = torch.stack([x.isfinite() for x in tensors.values()]).all(0)
    if not finite.all():
        raise _refused(path, "hold finite values", f"others, at place {int((~finite).nonzero()[0])} first")
    if metadata.get("digest") != _digest(tensors):
        raise _refused(path, f"have the digest {_digest(tensors)} of its values", metadata.get("digest"))
    return tensors


def _bytes(path: Path) -> bytes:
    """The bytes of a regular file. Not memory-mapped: an I/O error would then kill the process with SIGBUS."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would block
            raise _refused(path, "be a regular file", stat.filemode(path.stat().st_mode))
        return path.read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            raise
        raise _refused(path, "be readable", error) from error


def missing(n_rows: int) -> Tensor:
    return torch.full((n_rows, 2), MISSING)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for x in tensors.values():
        digest.update(x.numpy().data)
    return digest.hexdigest()


def _refused(path: Path, rule: str, found: object) -> ValueError:
    return ValueError(
        f"ref_logps: {path} must {rule}; got {found}. Nothing of it is used. Delete it, and its rows are computed "
        "again, or choose another cache directory"
    )
