"""The files that store values: safetensors, written under a temporary name and then renamed, so that
they are finished or do not exist for readers, and used only after a check of their contents.

    <cache directory>/<key>/<random name>.safetensors
        rows      int64 [n]    indices of rows of the dataset, each once
        chosen    float32 [n]  sums of log-probabilities in nats, finite
        rejected  float32 [n]
        metadata  key, and digest: the SHA-256 of all tensors, by which what has another writer is known

The key depends on the dataset, so a run reads the values of its own rows alone.

A file has a random name and one writer, and is never changed. If two files hold the same row, which
can happen after two runs of the same computation, the first by name counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from .. import atomic_files
from ..reasons import Reason

SUFFIX = ".safetensors"
"""The end of the names of files. Other files are left alone."""

MISSING = -torch.inf


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

    def files(self) -> list[Path]:
        """The finished files, sorted by name. None in a directory that does not exist or cannot be listed."""
        return sorted(self.directory.glob(f"*{SUFFIX}"))

    def unusable_reason(self) -> Reason | None:
        """Returns why files cannot be stored, or None if they can: creates the directory if needed, writes and deletes
        a file, and lists it.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            next(self.directory.iterdir(), None)
            with atomic_files.temporary(self.directory, bytes(4096)) as probe:
                probe.unlink()
        except OSError as error:
            return Reason("cache-directory", directory=self.directory, error=error)
        return None

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
        for path in self.files():
            try:
                yield path, *_read_file(path, self.key)
            except FileNotFoundError:
                continue  # merged into another file meanwhile

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Stores the values [n, 2] of these rows [n] in a new file. Raises OSError if that fails."""
        tensors = {"rows": rows.long(), "chosen": values[:, 0].contiguous(), "rejected": values[:, 1].contiguous()}
        metadata = {"key": self.key, "digest": digest_of(tensors)}
        atomic_files.write(self.directory / f"{uuid4().hex}{SUFFIX}", safetensors.torch.save(tensors, metadata))

    def merge(self, values: Tensor) -> None:
        """Replaces several files by one with all rows.

        Deletes only files that could be read. Two processes may do this at the same time: a file with all rows is
        only deleted when there is another one before it.
        """
        if len(self.files()) > 1:
            stored = [(path, len(rows)) for path, rows, _ in self._stored()]
            complete = next((path for path, n in stored if n == self.n_rows), None)
            if complete is None:
                self.write(torch.arange(self.n_rows, device="cpu"), values)
            for path, _ in stored:
                if path != complete:
                    path.unlink(missing_ok=True)


def _read_file(path: Path, key: str) -> tuple[Tensor, Tensor]:
    """Reads the rows [n] and their values [n, 2] of a file that `Shards.write` has written for this key.

    Raises:
        ValueError: the file was not written so, or cannot be read.
        FileNotFoundError: the file does not exist any more.
    """
    try:
        data = path.read_bytes()  # not memory-mapped: an I/O error would then kill the process with SIGBUS
        tensors = safetensors.torch.load(data)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _invalid(path, "be readable", error) from error
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise _invalid(path, "be a whole safetensors file", error) from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__", {})
    if metadata.get("key") != key:
        raise _invalid(path, f"have the key {key}", metadata.get("key"))
    if metadata.get("digest") != digest_of(tensors):
        raise _invalid(path, f"have the digest {digest_of(tensors)} of its tensors", metadata.get("digest"))
    return tensors["rows"], torch.stack([tensors["chosen"], tensors["rejected"]], 1)


def _invalid(path: Path, rule: str, actual: object) -> ValueError:
    return ValueError(
        f"ref_logps: {path} must {rule}; got {actual}. Nothing of it is used. Delete it, so that its rows are "
        "computed again, or choose another cache directory"
    )


def missing(n_rows: int) -> Tensor:
    return torch.full((n_rows, 2), MISSING, device="cpu")


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Hash of the names, dtypes, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.numpy().data)
    return digest.hexdigest()
