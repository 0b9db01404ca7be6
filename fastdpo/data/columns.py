"""The token ids of a preference dataset, read from its columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from .. import checks

COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
"""Those of precomputed references, which TRL reads."""
INTS = (int, np.integer)
ROWS_READ_AT_ONCE = 1000


def column_names(dataset: Any) -> set[str]:
    """The columns of a dataset, or those of its first row if it is a sequence of mappings. Empty if it has none."""
    names = getattr(dataset, "column_names", None)
    if names is None and _is_sequence(dataset) and len(dataset) and isinstance(dataset[0], Mapping):
        names = dataset[0]
    return set(names or ())


def columns_of_rows(op: str, dataset: Any) -> set[str]:
    """The columns of a dataset, or those of all rows of a sequence of mappings."""
    if hasattr(dataset, "column_names"):
        return set(dataset.column_names)
    return set().union(*(mapping_of(op, dataset[i]) for i in range(len(dataset))))


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
            yield [_of_lists(op, name, [ids_of(op, name, row, columns) for row in rows]) for name in columns]


def arrow_columns(dataset: Any, columns: Sequence[str] = COLUMNS) -> Any:
    """These columns of a `datasets.Dataset`, or None for a sequence of mappings."""
    return dataset.select_columns(list(columns)) if hasattr(dataset, "select_columns") else None


def has_transform(dataset: Any) -> bool:
    """Whether the rows of a dataset are made when they are read (`with_transform`): its columns may hold others."""
    return hasattr(dataset, "with_transform") and dataset.format["type"] == "custom"


def require_dataset(op: str, dataset: object) -> None:
    if not _is_sequence(dataset):
        kind = type(dataset).__name__
        raise TypeError(f"{op}: dataset must be a datasets.Dataset or a sequence of mappings; got {kind}")
    if len(dataset):  # pyright: ignore[reportArgumentType]
        mapping_of(op, dataset[0])  # pyright: ignore[reportIndexIssue]


def mapping_of(op: str, row: object) -> Mapping:
    if not isinstance(row, Mapping):
        raise TypeError(f"{op}: dataset must hold mappings; got a {type(row).__name__}")
    return row


def ids_of(op: str, name: str, row: Mapping, columns: Sequence[str] = COLUMNS) -> list[int]:
    """The column of a row that is not in Arrow."""
    if name not in mapping_of(op, row):
        raise ValueError(f"{op}: dataset must have {', '.join(columns)} in every row; got {checks.shown(list(row))}")
    ids = row[name].tolist() if hasattr(row[name], "tolist") else row[name]
    if not _is_sequence(ids):
        raise _not_ids(op, name, checks.shown(row[name]))
    return list(ids)


def _is_sequence(x: object) -> bool:
    return hasattr(x, "__len__") and hasattr(x, "__getitem__") and not isinstance(x, Mapping | str | bytes)


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
