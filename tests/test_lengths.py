"""The lengths of a dataset against the layouts of the batches that TRL's collator makes of it."""

import numpy as np
import pytest
from datasets import Dataset
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.reward_trainer import DataCollatorForPreference as RewardCollator

from fastdpo import packing
from fastdpo.data import columns
from fastdpo.data.columns import COLUMNS
from fastdpo.lengths import pair_lengths
from fastdpo.models import reward_head


def random_rows(n: int = 60) -> list[dict[str, list[int]]]:
    """Ragged pairs over a vocabulary of two ids, so that completions often begin alike; without a prompt, without one
    of the completions, and with equal ones.
    """
    rng = np.random.default_rng(0)
    rows = [{name: rng.integers(1, 3, rng.integers(0, 9)).tolist() for name in COLUMNS} for _ in range(n)]
    return [*rows, {"prompt_ids": [1], "chosen_ids": [2, 1, 2], "rejected_ids": [2, 1, 2]}]


def layout(row: dict[str, list[int]], share: bool, store_all: bool, **truncation) -> packing.Layout | None:
    """How one pair is stored, or None if nothing of it is."""
    batch = DataCollatorForPreference(pad_token_id=0, **truncation)([row])
    ids = batch["input_ids"].long()
    labels = ids.where(batch["completion_mask"] == 1, packing.IGNORE_INDEX)
    if not store_all and not (labels[:, 1:] != packing.IGNORE_INDEX).any():
        return None  # a batch without any label keeps one token
    groups = ids.new_zeros(2) if share else None
    try:
        return packing.pack(ids, batch["attention_mask"], labels, groups=groups, store_all=store_all)
    except packing.NotPackable:
        return None


@pytest.mark.parametrize("truncation_mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("max_length", [None, 1, 5, 11])
@pytest.mark.parametrize("store_all", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_lengths_are_those_of_the_layouts(share, store_all, max_length, truncation_mode):
    rows = random_rows()
    truncation = {"max_length": max_length, "truncation_mode": truncation_mode}
    lengths = pair_lengths(rows, **truncation)
    layouts = [layout(row, share, store_all, **truncation) for row in rows]
    assert lengths.packed(share=share, store_all=store_all).tolist() == [
        0 if x is None else len(x.token_index) for x in layouts
    ]
    assert lengths.scored(share=share).tolist() == [0 if x is None else len(x.score_index) for x in layouts]
    batches = [DataCollatorForPreference(pad_token_id=0, **truncation)([row]) for row in rows]
    real = np.array([batch["attention_mask"].sum(1).tolist() for batch in batches])
    assert [lengths.chosen.tolist(), lengths.rejected.tolist()] == real.T.tolist()
    assert lengths.longest.tolist() == [batch["input_ids"].shape[1] for batch in batches]


@pytest.mark.parametrize("share", [False, True])
def test_lengths_for_a_reward_model_are_those_of_its_layouts(share):
    rows = [{name: [*row["prompt_ids"], *row[name]] for name in COLUMNS[1:]} for row in random_rows()]
    rows = [row for row in rows if all(row.values())]
    lengths, layouts = pair_lengths(rows, rewards=True), []
    for row in rows:
        batch = RewardCollator(pad_token_id=0)([row])
        ids, labels = batch["input_ids"], reward_head.labels_of(batch["input_ids"], 0)
        groups = ids.new_zeros(2) if share else None
        layouts.append(packing.pack(ids, batch["attention_mask"], labels, groups=groups, shifted=True))
    assert lengths.packed(share=share).tolist() == [len(x.token_index) for x in layouts]
    assert lengths.scored(share=share).tolist() == [len(x.score_index) for x in layouts]
    assert lengths[:3].packed(share=share).tolist() == lengths.packed(share=share)[:3].tolist()


@pytest.mark.parametrize("max_length", [None, 5])
def test_what_other_pairs_can_share(max_length):
    rows = [
        dict(prompt_ids=[1, 2, 3], chosen_ids=[4], rejected_ids=[5, 6]),
        dict(prompt_ids=[1, 2, 3], chosen_ids=[4], rejected_ids=[4, 5, 6]),
        dict(prompt_ids=[1, 2, 3, 4, 5, 6], chosen_ids=[4], rejected_ids=[4, 5, 6]),
        dict(prompt_ids=[], chosen_ids=[4], rejected_ids=[4, 5, 6]),
    ]
    from_start, from_end = (pair_lengths(rows, max_length, mode) for mode in ("keep_start", "keep_end"))
    assert from_start.sharable.tolist() == [3, 3, 6 if max_length is None else 0, 0]
    assert from_end.sharable.tolist() == [3, 3, 6 if max_length is None else 0, 0]
    assert from_end.skipped.tolist() == [0, 0, 0 if max_length is None else 2, 0]


def test_tables_and_lists_have_the_same_lengths(monkeypatch):
    rows = random_rows()
    monkeypatch.setattr(columns, "ROWS_READ_AT_ONCE", 7)
    of_lists, of_arrow = pair_lengths(rows), pair_lengths(Dataset.from_list(rows))
    for name, values in vars(of_lists).items():
        assert values.tolist() == vars(of_arrow)[name].tolist(), name
    some = np.array([3, 0])
    assert of_lists[some].chosen.tolist() == of_lists.chosen[some].tolist()
    assert len(pair_lengths([])) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 0}, "max_length must be a positive integer or None; got 0"),
        ({"truncation_mode": "start"}, "truncation_mode must be one of keep_start, keep_end; got 'start'"),
        ({"dataset": [dict.fromkeys(COLUMNS, "a")]}, "prompt_ids must hold a list of token ids in every row; got"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError) as error:
        pair_lengths(**{"dataset": random_rows()} | arguments)
    assert str(error.value).startswith(f"pair_lengths: {message}")
