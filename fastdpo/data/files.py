"""Reads preference pairs from a .jsonl, .json or .parquet file or a `save_to_disk` directory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("prompt", "chosen", "rejected", "image", "images", "tools", "chat_template_kwargs")
"""The columns that TRL reads of a preference dataset."""

TEXTS = ("prompt", "chosen", "rejected")
"""Those of them that must have a value in every row."""


def load_preferences(path: Path, required: Collection[str] = ("chosen", "rejected")) -> Dataset:
    """The `COLUMNS` of a dataset, or of its first split.

    Args:
        path: of the dataset.
        required: the columns that it must have. TRL finds a prompt that the two answers begin with.

    Raises:
        ValueError: the path does not exist, the format is unknown, the file is malformed, a column or a
            text is missing, or there are no pairs.
    """
    from datasets import Dataset, DatasetDict, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    if not path.exists():
        raise ValueError(f"the dataset must exist; got {path}")
    if path.is_dir():
        try:
            loaded = load_from_disk(str(path))
        except FileNotFoundError as error:
            raise ValueError(f"the dataset must be a file or a save_to_disk directory; got {path}") from error
        dataset = next(iter(loaded.values())) if isinstance(loaded, DatasetDict) else loaded
    elif path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.stat().st_size:
            raise ValueError(f"the dataset must not be empty; got {path}")
        read = Dataset.from_parquet if path.suffix == ".parquet" else Dataset.from_json
        try:
            dataset = cast(Dataset, read(str(path)))
        except DatasetGenerationError as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise ValueError(f"the dataset must be a well-formed {path.suffix} file; got {path}: {reason}") from error
    else:
        raise ValueError(
            f"the dataset must be a .jsonl, .json or .parquet file or a save_to_disk directory; got {path}"
        )
    missing = set(required) - set(dataset.column_names)
    if missing:
        raise ValueError(f"the dataset must have the columns {sorted(required)}; got {path} without {sorted(missing)}")
    if not len(dataset):
        raise ValueError(f"the dataset must not be empty; got {path}")
    for name in TEXTS:
        if name in dataset.column_names and (row := _first_null(dataset, name)) is not None:
            raise ValueError(f"the dataset must have a {name} in every row; got {path} with none in row {row}")
    return dataset.select_columns([name for name in COLUMNS if name in dataset.column_names])


def _first_null(dataset: Dataset, column: str) -> int | None:
    """The first row without a value in a column, or None."""
    if not dataset.data.column(column).null_count:
        return None
    return next((i for i, value in enumerate(dataset[column]) if value is None), None)
