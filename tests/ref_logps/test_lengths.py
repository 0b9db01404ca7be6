"""The lengths of a dataset against the layouts of the batches that TRL's collator makes of it."""

import numpy as np
import pytest
from datasets import Dataset
from trl.trainer.dpo_trainer import DataCollatorForPreference

from fastdpo import packing
from fastdpo.data import columns
from fastdpo.data.columns import COLUMNS
from fastdpo.ref_logps.lengths import PairLengths
from fastdpo.ref_logps.pairs import Pairs


def random_rows(n: int = 60) -> list[dict[str, list[int]]]:
    """Ragged pairs over a vocabulary of two ids, so that completions often begin alike; without a prompt, without one
    of the completions, and with equal ones.
    """
    rng = np.random.default_rng(0)
    rows = [{name: rng.integers(1, 3, rng.integers(0, 9)).tolist() for name in COLUMNS} for _ in range(n)]
    return [*rows, {"prompt_ids": [1], "chosen_ids": [2, 1, 2], "rejected_ids": [2, 1, 2]}]


def layout(row: dict[str, list[int]], **truncation) -> packing.Layout | None:
    """How one pair is stored, or None if nothing of it is."""
    batch = DataCollatorForPreference(pad_token_id=0, **truncation)([row])
    ids = batch["input_ids"].long()
    labels = ids.where(batch["completion_mask"] == 1, packing.IGNORE_INDEX)
    if not (labels[:, 1:] != packing.IGNORE_INDEX).any():
        return None  # a batch without any label keeps one token
    try:
        return packing.pack(ids, batch["attention_mask"], labels, groups=ids.new_zeros(2))
    except packing.NotPackable:
        return None


@pytest.mark.parametrize("truncation_mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("max_length", [None, 1, 5, 11])
def test_lengths_are_those_of_the_layouts(max_length, truncation_mode):
    rows = random_rows()
    truncation = {"max_length": max_length, "truncation_mode": truncation_mode}
    lengths = Pairs(rows, max_length, truncation_mode).lengths
    layouts = [layout(row, **truncation) for row in rows]
    assert lengths.packed().tolist() == [0 if x is None else len(x.token_index) for x in layouts]
    batches = [DataCollatorForPreference(pad_token_id=0, **truncation)([row]) for row in rows]
    real = np.array([batch["attention_mask"].sum(1).tolist() for batch in batches])
    assert [lengths.chosen.tolist(), lengths.rejected.tolist()] == real.T.tolist()
    assert lengths.longest.tolist() == [batch["input_ids"].shape[1] for batch in batches]


def test_tables_and_lists_have_the_same_lengths(monkeypatch):
    rows = random_rows()
    monkeypatch.setattr(columns, "ROWS_READ_AT_ONCE", 7)
    of_lists, of_arrow = Pairs(rows).lengths, Pairs(Dataset.from_list(rows)).lengths
    for name, values in vars(of_lists).items():
        assert values.tolist() == vars(of_arrow)[name].tolist(), name
    assert len(PairLengths.joined([])) == 0
