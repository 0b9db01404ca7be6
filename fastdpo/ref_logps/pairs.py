"""The pairs that reference log-probabilities are computed of, and the batches to run them in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import checks
from ..data.columns import COLUMNS, arrow_columns, columns_of_rows, has_transform, ids_of, read_columns, require_dataset
from ..packing import IGNORE_INDEX
from .lengths import PairLengths

if TYPE_CHECKING:
    from datasets import Dataset

TRUNCATIONS = ("keep_start", "keep_end")
IMAGES = ("images", "image")  # columns, as in TRL


class Pairs:
    """A dataset of tokenized pairs and their truncation. Keeps lengths in memory, but not ids.

    Token ids must not be negative, and must lie below `vocabulary` if it is given.

    Attributes:
        lengths: of the pairs after truncation.
        digest: hash of all token ids in their order.
    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Mapping],
        max_length: int | None = None,
        truncation_mode: str = "keep_start",
        vocabulary: int | None = None,
    ):
        checks.require_positive_integer("precompute", "max_length", max_length, optional=True)
        is_known, rule = truncation_mode in TRUNCATIONS, f"be one of {', '.join(TRUNCATIONS)}"
        checks.require(is_known, "precompute", "truncation_mode", rule, checks.shown(truncation_mode))
        require_dataset("precompute", dataset)
        _require_stored(dataset)
        _require_text(dataset)
        self.max_length = None if max_length is None else int(max_length)
        self.truncation_mode = truncation_mode
        self._dataset: Any = dataset
        self._arrow = arrow_columns(dataset)
        self._vocabulary = vocabulary
        self.lengths, self.digest = self._read()

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, indices: Iterable[int]) -> list[dict[str, list[int]]]:
        """Lists of ids by the names of `COLUMNS` for these rows, before truncation."""
        if self._arrow is None:
            rows = [self._dataset[int(i)] for i in indices]
            return [{name: ids_of("precompute", name, row) for name in COLUMNS} for row in rows]
        table = self._arrow.with_format(None)[[int(i) for i in indices]]
        return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*(table[name] for name in COLUMNS), strict=True)]

    def collate(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
        """input_ids, attention_mask and labels, int64 [2B, L], padded on the
        right; rows i and B + i are a pair.
        """
        keep = slice(None)
        if self.max_length is not None:
            start = self.truncation_mode == "keep_start"
            keep = slice(self.max_length) if start else slice(-self.max_length, None)
        ids, labels = [], []
        for answer in COLUMNS[1:]:
            for row in rows:
                ids.append(torch.tensor([*row["prompt_ids"], *row[answer]][keep], dtype=torch.long, device="cpu"))
                unscored = [IGNORE_INDEX] * len(row["prompt_ids"])
                labels.append(torch.tensor([*unscored, *row[answer]][keep], dtype=torch.long, device="cpu"))
        return {
            "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
            "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
            "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
        }

    def _read(self) -> tuple[PairLengths, str]:
        """Lengths, and a digest of all ids in their order, which is
        the same for Arrow and for lists.
        """
        digest, parts, first = hashlib.sha256(), [], 0
        for columns in read_columns("precompute", self._dataset):
            for name, (ids, sizes) in zip(COLUMNS, columns, strict=True):
                self._check(name, ids, sizes, first)
                digest.update(sizes.tobytes())
                digest.update(ids.tobytes())
            parts.append(PairLengths.of(columns, self.max_length, self.truncation_mode))
            first += len(parts[-1])
        return PairLengths.joined(parts), digest.hexdigest()

    def _check(self, name: str, ids: np.ndarray, sizes: np.ndarray, first: int) -> None:
        """Raises ValueError for the first id out of range. `first` is the
        index of the first of these rows.
        """
        wrong = ids < 0 if self._vocabulary is None else (ids < 0) | (ids >= self._vocabulary)
        if wrong.any():
            place = int(wrong.argmax())
            row = first + int(np.searchsorted(sizes.cumsum(), place, side="right"))
            rule = "not be negative" if self._vocabulary is None else f"lie from 0 to {self._vocabulary - 1}"
            raise ValueError(f"precompute: {name} must {rule}; got {ids[place]} in row {row}")


def _require_stored(dataset: Any) -> None:
    """Raises ValueError for a dataset whose rows may be other ones each time."""
    if has_transform(dataset):
        raise ValueError(
            "precompute: dataset must store its rows; got one with a transform (with_transform), which makes them when "
            "they are read. Make them once by dataset.map"
        )


def _require_text(dataset: Any) -> None:
    """Raises ValueError for a dataset with images, which would be left out."""
    names = columns_of_rows("precompute", dataset)
    images = [name for name in IMAGES if name in names]
    if images:
        raise ValueError(
            f"precompute: dataset must not have images, which the log-probabilities would leave out; got the column "
            f"{images[0]!r}. Remove it if the pairs are text only"
        )


def batches(order: np.ndarray, lengths: PairLengths, tokens: int, pairs: int | None) -> list[np.ndarray]:
    """Splits rows, the longest first, into batches of up to `tokens` packed tokens and up to
    `pairs` pairs.

    A pair of more tokens is a batch of its own.
    """
    packed = lengths.packed()
    order = order[np.lexsort((order, -packed[order], -lengths.longest[order]))]
    ends, used, first = [], 0, 0
    for i, cost in enumerate(packed[order]):
        if i > first and (used + cost > tokens or i - first == pairs):
            ends.append(i)
            used, first = 0, i
        used += cost
    return np.split(order, ends) if len(order) else []
