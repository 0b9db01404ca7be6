"""Reads preference pairs from a .jsonl, .json or .parquet file or a `save_to_disk` directory."""

from pathlib import Path

from datasets import Dataset, DatasetDict, load_from_disk

COLUMNS = ["prompt", "chosen", "rejected"]


def load_preferences(path: Path) -> Dataset:
    """The columns prompt, chosen and rejected of a dataset, or of its first split.

    Raises:
        ValueError: the format is unknown, or a column is missing.
    """
    if path.is_dir():
        loaded = load_from_disk(str(path))
        dataset = next(iter(loaded.values())) if isinstance(loaded, DatasetDict) else loaded
    elif path.suffix in (".jsonl", ".json"):
        dataset = Dataset.from_json(str(path))
    elif path.suffix == ".parquet":
        dataset = Dataset.from_parquet(str(path))
    else:
        raise ValueError(f"--dataset must be a .jsonl, .json or .parquet file or a save_to_disk directory; got {path}")
    missing = set(COLUMNS) - set(dataset.column_names)
    if missing:
        raise ValueError(f"--dataset must have the columns {COLUMNS}; got {path} without {sorted(missing)}")
    return dataset.select_columns(COLUMNS)
