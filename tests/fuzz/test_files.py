"""Stored log-probabilities: what was written is read, and a damaged file is an error, never values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from fastdpo.ref_logps.shards import Shards
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


def values_or_error(read: Callable[[], torch.Tensor]) -> torch.Tensor | ValueError:
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
        assert len(shards.files()) == case.written
        with pytest.raises(ValueError, match="must have the key other"):
            Shards(directory, "other", case.rows).read()
        if case.damage == "none":
            shards.merge(expected if (expected > -torch.inf).all() else values)
            assert len(shards.files()) == 1
            return
        path = shards.files()[case.seed % case.written]
        path.write_bytes(damaged(path.read_bytes(), case))
        after = values_or_error(shards.read)
        if isinstance(after, ValueError):
            assert str(path) in str(after)
        else:  # the damage is in what nothing depends on, such as the header's padding
            assert torch.equal(after, expected)


test_shards = fuzzed(FILES, 0.02)(check_files)
