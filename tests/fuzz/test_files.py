"""Stored log-probabilities: what was written is read, and a damaged file is an error, never values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from fastdpo import storage
from fastdpo.ref_logps import shards as files
from fastdpo.ref_logps.shards import BY_ROW, Shards, read_file, write_file
from tests.support.fuzzing import SEEDS, Source, fuzzed


class Files(NamedTuple):
    """Rows that several processes have stored.

    Attributes:
        rows: of the dataset.
        written: the number of files.
        stored: the share of the rows that each file has.
        damage: what happens to one file: "cut", "flip" (a bit), "append" or "none".
        place: where, as a share of its length.
    """

    seed: int
    rows: int
    written: int
    stored: float
    damage: str
    place: float


FILES = st.builds(
    Files,
    seed=SEEDS,
    rows=st.integers(1, 12),
    written=st.integers(1, 3),
    stored=st.sampled_from([0.0, 0.5, 1.0]),
    damage=st.sampled_from(["none", "cut", "flip", "append"]),
    place=st.floats(0, 1, exclude_max=True),
)


def damaged(data: bytes, case: Files) -> bytes:
    place = int(case.place * len(data))
    if case.damage == "cut":
        return data[:place]
    if case.damage == "append":
        return data + b"\0" * (1 + place)
    return data[:place] + bytes([data[place] ^ (1 << case.seed % 8)]) + data[place + 1 :]


def values_or_error(read: Callable[[], dict]) -> dict | ValueError:
    try:
        return read()
    except ValueError as error:
        return error


def check_files(case: Files) -> None:
    source = Source(case.seed)
    values = source.normal(case.rows, 2, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        shards = Shards(directory, "key", case.rows)
        expected = torch.full((case.rows, 2), -torch.inf)
        for _ in range(case.written):
            rows = source.mask(case.stored, case.rows).nonzero()[:, 0]
            shards.write(rows, values[rows])
            expected[rows] = values[rows]
        assert torch.equal(shards.read(), expected)
        assert len(storage.files(directory)) == case.written
        with pytest.raises(ValueError, match="must have the key other"):
            Shards(directory, "other", case.rows).read()
        if case.damage == "none":
            shards.merge(expected if (expected > -torch.inf).all() else values)
            assert len(storage.files(directory)) == 1
            return
        path = storage.files(directory)[case.seed % case.written]
        before = read_file(path, "key", BY_ROW)
        path.write_bytes(damaged(path.read_bytes(), case))
        after = values_or_error(lambda: read_file(path, "key", BY_ROW))
        if isinstance(after, ValueError):
            assert str(path) in str(after)
        else:  # the damage is in what nothing depends on, such as the header's padding
            assert all(torch.equal(after[name], before[name]) for name in before)


def check_memory(case: Files) -> None:
    """The values of the reference memory, by digests of pairs."""
    source = Source(case.seed)
    digests = {bytes(source.integers(0, 255, 16).tolist()) for _ in range(case.rows)}
    values = {digest: tuple(source.normal(2, scale=50.0).tolist()) for digest in sorted(digests)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        files.write_by_content(directory, "key", values)
        assert files.read_by_content(directory, "key") == values
        (path,) = directory.iterdir()
        if case.damage == "none":
            return
        path.write_bytes(damaged(path.read_bytes(), case))
        after = values_or_error(lambda: files.read_by_content(directory, "key"))
        assert str(path) in str(after) if isinstance(after, ValueError) else after == values


def test_files_with_other_names_are_refused(tmp_path):
    write_file(tmp_path, "key", {"rows": torch.zeros(1, dtype=torch.long)})
    with pytest.raises(ValueError, match="must hold"):
        Shards(tmp_path, "key", 1).read()


test_shards = fuzzed(FILES, 0.02)(check_files)
test_reference_memory = fuzzed(FILES, 0.01)(check_memory)
