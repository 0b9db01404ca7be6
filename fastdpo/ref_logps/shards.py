"""The files that values are kept in: safetensors, written whole or not at all, believed only after a look at all of it.

    <cache directory>/<key>/<random name>.safetensors
        rows      int64 [n]    row numbers of the data set, each once
        chosen    float32 [n]  sums of log-probabilities in nats, finite
        rejected  float32 [n]
        metadata  key, and digest: the sha256 of the bytes of the three

A file is named by chance, has one writer, and is never changed. If two hold the same row, which can only be after two
runs of the same computation, the first by name counts.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import safetensors.torch
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor

logger = logging.getLogger("fastdpo")

MISSING = -torch.inf
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
    def lock(self) -> Iterator[None]:
        """Held by one job at a time, so that no two compute the same. Ends with its process, however that ends."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.directory / ".lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger.warning(
                "reference log-probabilities: waiting for another process that computes the same ones, and holds %s",
                lock.lock_file,
            )
            lock.acquire()
        try:
            for leftover in self.directory.glob(".*.tmp"):  # of processes that were killed
                leftover.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def read(self) -> Tensor:
        """float32 [N, 2], chosen and rejected of each row; -inf where no file has it.

        Raises:
            ValueError: a file is not one that `write` has made for this key.
        """
        values = missing(self.n_rows)
        for path in files(self.directory):
            try:
                rows, found = self._load(path)
            except FileNotFoundError:
                continue  # merged with others meanwhile
            new = values[rows, 0] == MISSING
            values[rows[new]] = found[new]
        return values

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Adds the values [n, 2] of these rows [n]."""
        tensors = {"rows": rows.long(), "chosen": values[:, 0].contiguous(), "rejected": values[:, 1].contiguous()}
        write_file(self.directory, self.key, tensors)  # the lock's holder may have another disk

    def merge(self, values: Tensor) -> None:
        """One file of all rows instead of many. Only under the lock."""
        old = files(self.directory)
        if len(old) > 1:
            self.write(torch.arange(self.n_rows), values)
            for path in old:
                path.unlink(missing_ok=True)

    def _load(self, path: Path) -> tuple[Tensor, Tensor]:
        rows, chosen, rejected = read_file(path, self.key, DTYPES).values()
        if len(rows) and (rows.min() < 0 or rows.max() >= self.n_rows):
            bounds = f"{int(rows.min())} to {int(rows.max())}"
            raise _refused(path, f"hold rows from 0 to {self.n_rows - 1}", bounds)
        if len(rows.unique()) != len(rows):
            raise _refused(path, "hold each row once", f"{len(rows) - len(rows.unique())} of {len(rows)} repeated")
        return rows, torch.stack([chosen, rejected], 1)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def write_file(directory: Path, key: str, tensors: dict[str, Tensor]) -> None:
    """A new file, by a random name, whole or not at all."""
    data = safetensors.torch.save(tensors, {"key": key, "digest": _digest(tensors)})
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{uuid4().hex}.tmp"
    with temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / f"{uuid4().hex}.safetensors")


def read_file(path: Path, key: str, dtypes: dict[str, str]) -> dict[str, Tensor]:
    """The tensors [n] of these names and dtypes, in their order, if the file is what `write_file` makes of them.

    Raises:
        ValueError: it is not, or a value is not finite.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != key:
                raise _refused(path, f"have the key {key}", metadata.get("key"))
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: x.get_dtype() for name, x in slices.items()}
            shapes = {tuple(x.get_shape()) for x in slices.values()}
            if found != dtypes or len(shapes) != 1 or len(next(iter(shapes))) != 1:
                raise _refused(path, f"hold {dtypes}, all of one length", f"{found} of shapes {sorted(shapes)}")
            tensors = {name: file.get_tensor(name).clone() for name in dtypes}  # not the mapped file
    except SafetensorError as error:
        raise _refused(path, "be a whole safetensors file", error) from error
    finite = torch.stack([x.isfinite() for x in tensors.values()]).all(0)
    if not finite.all():
        raise _refused(path, "hold finite values", f"others, at place {int((~finite).nonzero()[0])} first")
    if metadata.get("digest") != _digest(tensors):
        raise _refused(path, f"have the digest {_digest(tensors)} of its values", metadata.get("digest"))
    return tensors


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
