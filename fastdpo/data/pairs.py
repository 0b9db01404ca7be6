"""The token ids of a preference dataset, the lengths of its pairs, and the batches to run them in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import checks
from ..packing import IGNORE_INDEX

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
INTS = (int, np.integer)
IMAGES = ("images", "image")  # columns, as in TRL
TRUNCATIONS = ("keep_start", "keep_end")
ROWS_READ_AT_ONCE = 1000


class Sizes(NamedTuple):
    """The sizes of pairs after truncation.

    Attributes:
        packed: int64 [N], number of tokens, with those of the prompt counted once if both rows
            begin with it.
        longest: int64 [N], number of tokens of the longer row.
        scored: bool [N], whether any token is scored.
    """

    packed: np.ndarray
    longest: np.ndarray
    scored: np.ndarray


class Pairs:
    """A dataset of tokenized pairs and their truncation. Keeps lengths in memory, but not ids.

    Token ids must not be negative, and must lie below `vocabulary` if it is given.

    Attributes:
        lengths: int64 [N, 3], number of tokens of prompt, chosen and rejected before truncation.
        digest: hash of all token ids in their order.
    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Mapping],
        max_length: int | None = None,
        truncation_mode: str = "keep_start",
        vocabulary: int | None = None,
    ):
        require_truncation("precompute", max_length, truncation_mode)
        require_dataset("precompute", dataset)
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
            return [{name: _ids_of("precompute", name, row) for name in COLUMNS} for row in rows]
        table = self._arrow.with_format(None)[[int(i) for i in indices]]
        return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*(table[name] for name in COLUMNS), strict=True)]

    def sizes(self) -> Sizes:
        prompt, *answers = self.lengths.T
        rows, answers = truncated_lengths(prompt, answers, self.max_length, self.truncation_mode)
        prompts = [row - answer for row, answer in zip(rows, answers, strict=True)]
        shared = np.where(prompts[0] == prompts[1], prompts[0], 0)
        # Nothing scores the first token of a row.
        scored = [a > (p == 0) for p, a in zip(prompts, answers, strict=True)]
        return Sizes(sum(rows) - shared, np.maximum(*rows), scored[0] | scored[1])

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

    def _read(self) -> tuple[np.ndarray, str]:
        """Lengths, and a digest of all ids in their order, which is
        the same for Arrow and for lists.
        """
        digest, lengths = hashlib.sha256(), [np.zeros((0, 3), np.int64)]
        for columns in read_columns("precompute", self._dataset):
            first = sum(map(len, lengths))
            for name, (ids, sizes) in zip(COLUMNS, columns, strict=True):
                self._check(name, ids, sizes, first)
                digest.update(sizes.tobytes())
                digest.update(ids.tobytes())
            lengths.append(np.stack([sizes for _, sizes in columns], 1))
        return np.concatenate(lengths), digest.hexdigest()

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


def require_truncation(op: str, max_length: object, truncation_mode: object) -> None:
    checks.require_positive_integer(op, "max_length", max_length, optional=True)
    rule = f"be one of {', '.join(TRUNCATIONS)}"
    checks.require(truncation_mode in TRUNCATIONS, op, "truncation_mode", rule, checks.shown(truncation_mode))


def truncated_lengths(
    prompt: np.ndarray, answers: Sequence[np.ndarray], max_length: int | None, truncation_mode: str
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The number of tokens that truncation keeps of N rows, and of the answers in them.

    Args:
        prompt: tokens of the prompts, int64 [N].
        answers: tokens of the chosen and of the rejected answers, int64 [N] each.
        max_length, truncation_mode: as in `DPOConfig`.
    """
    rows = [prompt + answer for answer in answers]
    rows = rows if max_length is None else [np.minimum(row, max_length) for row in rows]
    if truncation_mode == "keep_start":
        return rows, [np.maximum(row - prompt, 0) for row in rows]
    return rows, [np.minimum(answer, row) for answer, row in zip(answers, rows, strict=True)]


def read_columns(
    op: str, dataset: Any, columns: Sequence[str] = COLUMNS
) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Yields, for `ROWS_READ_AT_ONCE` rows at a time, the concatenated ids and the lengths of each of
    these columns, int64.

    Args:
        op: the public function, for its error messages.
        dataset: a `datasets.Dataset` or a sequence of mappings.
        columns: their names.

    Raises:
        ValueError: a column does not hold lists of ids.
    """
    arrow = arrow_columns(dataset, columns)
    for start in range(0, len(dataset), ROWS_READ_AT_ONCE):
        stop = min(start + ROWS_READ_AT_ONCE, len(dataset))
        if arrow is not None:
            table = arrow.with_format("arrow")[start:stop]
            yield [_of_arrow(op, name, table[name].combine_chunks()) for name in columns]
        else:
            rows = [dataset[i] for i in range(start, stop)]
            yield [_of_lists(op, name, [_ids_of(op, name, row, columns) for row in rows]) for name in columns]


def arrow_columns(dataset: Any, columns: Sequence[str] = COLUMNS) -> Any:
    """These columns of a `datasets.Dataset`, or None for a sequence of mappings."""
    return dataset.select_columns(list(columns)) if hasattr(dataset, "select_columns") else None


def require_dataset(op: str, dataset: object) -> None:
    is_sequence = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_sequence or isinstance(dataset, Mapping | str | bytes):
        kind = type(dataset).__name__
        raise TypeError(f"{op}: dataset must be a datasets.Dataset or a sequence of mappings; got {kind}")
    if len(dataset):  # pyright: ignore[reportArgumentType]
        _mapping(op, dataset[0])  # pyright: ignore[reportIndexIssue]


def _mapping(op: str, row: object) -> Mapping:
    if not isinstance(row, Mapping):
        raise TypeError(f"{op}: dataset must hold mappings; got a {type(row).__name__}")
    return row


def _require_text(dataset: Any) -> None:
    """Raises ValueError for a dataset with images, which would be left out."""
    if hasattr(dataset, "column_names"):
        names = set(dataset.column_names)
    else:
        names = set().union(*(_mapping("precompute", dataset[i]) for i in range(len(dataset))))
    images = [name for name in IMAGES if name in names]
    if images:
        raise ValueError(
            f"precompute: dataset must not have images, which the log-probabilities would leave out; got the column "
            f"{images[0]!r}. Remove it if the pairs are text only"
        )


def batches(order: np.ndarray, sizes: Sizes, tokens: int, pairs: int | None) -> list[np.ndarray]:
    """Splits rows, the longest first, into batches of up to `tokens` packed tokens and up to
    `pairs` pairs.

    A pair of more tokens is a batch of its own.
    """
    order = order[np.lexsort((order, -sizes.packed[order], -sizes.longest[order]))]
    ends, used, first = [], 0, 0
    for i, cost in enumerate(sizes.packed[order]):
        if i > first and (used + cost > tokens or i - first == pairs):
            ends.append(i)
            used, first = 0, i
        used += cost
    return np.split(order, ends) if len(order) else []


def _ids_of(op: str, name: str, row: Mapping, columns: Sequence[str] = COLUMNS) -> list[int]:
    """The column of a row that is not in Arrow."""
    if name not in _mapping(op, row):
        raise ValueError(f"{op}: dataset must have {', '.join(columns)} in every row; got {checks.shown(list(row))}")
    ids = row[name].tolist() if hasattr(row[name], "tolist") else row[name]
    is_sequence = hasattr(ids, "__len__") and hasattr(ids, "__getitem__")
    if not is_sequence or isinstance(ids, Mapping | str | bytes):
        raise _not_ids(op, name, checks.shown(row[name]))
    return list(ids)


def _of_lists(op: str, name: str, lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    others = [kind for kind in set(map(type, chain.from_iterable(lists))) if kind is bool or not issubclass(kind, INTS)]
    if others:
        raise _not_ids(op, name, f"one with {', '.join(sorted(kind.__name__ for kind in others))}")
    try:
        ids = np.fromiter(chain.from_iterable(lists), np.int64)
    except OverflowError as error:
        raise _not_ids(op, name, "one with more than 64 bits") from error
    return ids, np.array([len(x) for x in lists], np.int64)


def _of_arrow(op: str, name: str, column) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow

    kind = column.type
    if not pyarrow.types.is_null(kind) and not hasattr(kind, "value_type"):
        raise _not_ids(op, name, kind)
    ids = column.flatten() if hasattr(column, "flatten") else column
    if column.null_count or ids.null_count or not (pyarrow.types.is_integer(ids.type) or not len(ids)):
        raise _not_ids(op, name, f"{kind}, {column.null_count + ids.null_count} of them missing")
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    ids = np.zeros(0) if not len(ids) else ids.to_numpy(zero_copy_only=False)
    return ids.astype(np.int64), lengths.astype(np.int64)


def _not_ids(op: str, name: str, actual: object) -> ValueError:
    return ValueError(
        f"{op}: {name} must hold a list of token ids in every row; got {actual}. "
        "TRL's trainers make these columns, see DPOTrainer.train_dataset"
    )
