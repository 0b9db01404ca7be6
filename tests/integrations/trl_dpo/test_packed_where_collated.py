"""Batches that come with their layouts: equal to stock, whatever other code does to them on their way."""

import copy
import pickle

import pytest
import torch
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from fastdpo import packing
from fastdpo.integrations.collating import CollatedBatch, with_layout
from fastdpo.models import batch as batches
from fastdpo.models.batch import PaddedBatch, as_current, labels_from
from fastdpo.packing import IGNORE_INDEX, Form, Layout
from tests.support.comparison import assert_trained_alike
from tests.support.trl.dpo import adapter, recorded_packs, train_both

EXAMPLES = [
    {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 1], "rejected_ids": [9, 10, 1]},
    {"prompt_ids": [11], "chosen_ids": [12, 13, 14], "rejected_ids": [1]},
]


def collated(**options) -> CollatedBatch:
    return with_layout(DataCollatorForPreference(pad_token_id=0)(EXAMPLES, **options), "content")


def labels_of(batch: dict) -> torch.Tensor:
    return batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORE_INDEX)


def as_a_worker_sends_it(batch):
    return pickle.loads(pickle.dumps(batch))


def as_pinned_memory(batch):
    clone = copy.copy(batch)  # as torch's loader does
    clone.update({name: x.clone() for name, x in batch.items()})
    return clone


@pytest.fixture
def packed(monkeypatch) -> list[int]:
    return recorded_packs(monkeypatch)


def layout_in_a_call(batch: dict, labels: torch.Tensor, groups="content", reach=None) -> Layout:
    padded = PaddedBatch(batch["input_ids"], batch["attention_mask"], labels, shifted=False)
    with labels_from(batch.get("completion_mask"), batch["input_ids"]):
        return batches.layout_of(padded, Form(groups, reach=reach))


def as_a_step_gets_it(batch: CollatedBatch) -> dict:
    return as_current(batch.to(torch.device("cpu")))


WAYS = {
    "as it is": lambda batch: batch,
    "from a worker": as_a_worker_sends_it,
    "pinned": as_pinned_memory,
    "from a worker, pinned": lambda batch: as_pinned_memory(as_a_worker_sends_it(batch)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_comes_with_its_layout(way, packed):
    batch = as_a_step_gets_it(WAYS[way](collated()))
    assert type(batch) is dict
    labels, before = labels_of(batch), len(packed)
    layout = layout_in_a_call(batch, labels)
    assert layout_in_a_call(batch, labels) is layout
    assert len(packed) == before
    made = packing.pack(batch["input_ids"], batch["attention_mask"], labels, groups="content")
    for name, x in vars(made).items():
        assert torch.equal(x, getattr(layout, name)) if isinstance(x, torch.Tensor) else x == getattr(layout, name)


def test_what_a_cpu_does_not_move_is_not_made_again():
    batch = collated()
    assert batch.to(torch.device("cpu")).packed is batch.packed
    pinned = as_pinned_memory(batch)
    assert pinned.to(torch.device("cpu")).packed is not batch.packed


CHANGES = {
    "other labels": lambda batch: dict(labels=labels_of(batch).index_fill(1, torch.tensor([3]), IGNORE_INDEX)),
    "ids that were written to": lambda batch: batch["input_ids"].add_(0) * 0,
    "a mask that was written to": lambda batch: batch["completion_mask"].add_(0) * 0,
    "a copy of the ids": lambda batch: batch.update(input_ids=batch["input_ids"].clone()),
    "ids that were written to by `data`": lambda batch: batch["input_ids"].data[0].fill_(3),
    "ids that have other data": lambda batch: setattr(batch["input_ids"], "data", batch["input_ids"] + 1),
    "a mask that was written to by NumPy": lambda batch: batch["completion_mask"].numpy()[:, 3:].fill(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_that_has_changed_is_packed_again(change, packed):
    batch, before = as_a_step_gets_it(collated()), len(packed)
    changed = CHANGES[change](batch)
    layout_in_a_call(batch, **(changed if isinstance(changed, dict) else dict(labels=labels_of(batch))))
    assert len(packed) == before + 1


EARLY_CHANGES = {
    "written to": lambda batch: batch["completion_mask"].index_fill_(1, torch.tensor([3]), 0),
    "replaced": lambda batch: batch.update(input_ids=batch["input_ids"] + 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", EARLY_CHANGES)
def test_a_batch_that_has_changed_before_it_is_moved_is_packed_again(change, way, packed):
    batch = collated()
    EARLY_CHANGES[change](batch)
    moved = WAYS[way](batch)
    batch = as_a_step_gets_it(moved) if isinstance(moved, CollatedBatch) else moved
    labels, before = labels_of(batch), len(packed)
    layout = layout_in_a_call(batch, labels)
    assert len(packed) == before + 1
    assert torch.equal(layout.labels, labels[:, 1:][labels[:, 1:] != IGNORE_INDEX])


@pytest.mark.parametrize("options", [dict(groups=None), dict(reach=40)], ids=str)
def test_a_call_that_needs_another_layout_makes_it(options, packed):
    batch, before = as_a_step_gets_it(collated()), len(packed)
    layout_in_a_call(batch, labels_of(batch), **options)
    assert len(packed) == before + 1


def test_batches_that_cannot_be_packed_are_left_as_they_are():
    for batch in ({"input_ids": [[1]]}, torch.ones(2, 2), {"input_ids": torch.ones(2, 2)}):
        assert with_layout(batch, "content") is batch
    holes = {name: torch.tensor([[1, 0, 1]]) for name in ("input_ids", "attention_mask", "completion_mask")}
    assert with_layout(holes, "content") is holes


def without_some_labels(module, args, kwargs):
    if kwargs.get("labels") is None:
        return None
    labels = kwargs["labels"].clone()
    labels[:, ::2] = IGNORE_INDEX
    return args, {**kwargs, "labels": labels}


class Hooked(DPOTrainer):
    """A hook of the user changes labels that TRL has computed."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for model in (self.model, self.ref_model):
            if model is not None:
                model.register_forward_pre_hook(without_some_labels, with_kwargs=True)


class Shortened(DPOTrainer):
    """The user changes batches after their collation."""

    def training_step(self, model, inputs, *args, **kwargs):
        inputs["completion_mask"][:, ::2] = 0
        return super().training_step(model, inputs, *args, **kwargs)


class Unseen(DPOTrainer):
    """The user changes batches in a way that raises no version of their tensors."""

    def training_step(self, model, inputs, *args, **kwargs):
        inputs["completion_mask"].data[:, ::2] = 0
        inputs["input_ids"].numpy()[0, :] = 5
        return super().training_step(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("options", [dict(), adapter()], ids=["full", "LoRA"])
@pytest.mark.parametrize("trainer_class", [Hooked, Shortened, Unseen], ids=lambda x: x.__name__)
def test_labels_that_other_code_has_changed(tmp_path, trainer_class, options):
    assert_trained_alike(train_both(tmp_path, trainer_class=trainer_class, **options), policy=3, reference=3)


@pytest.mark.parametrize("trainer_class", [Hooked, Shortened], ids=lambda x: x.__name__)
def test_changed_labels_on_a_device(tmp_path, trainer_class, monkeypatch):
    """They are packed again there as well, if the change can be seen without a comparison. The CPU stands for one."""
    monkeypatch.setattr(batches, "is_host", lambda device: False)
    assert_trained_alike(train_both(tmp_path, trainer_class=trainer_class), policy=3, reference=3)


def test_batches_that_are_dispatched(tmp_path):
    """accelerate makes other batches of the same class, without layouts."""
    assert_trained_alike(
        train_both(tmp_path, accelerator_config={"dispatch_batches": True, "split_batches": True}),
        policy=3,
        reference=3,
    )
