"""Patched `precompute_ref_log_probs=True`: TRL's values, cached under a key of all their inputs.

The contract and test_pairwise.py compare trainings with precomputed values.
"""

import logging
from collections import Counter

import datasets
import pytest
import torch
from datasets import Dataset
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

import fastdpo
from fastdpo import ref_logps
from tests.support.comparison import RELATIVE, approximately, assert_close
from tests.support.models.families import tiny_family
from tests.support.recorded_calls import recorded_calls
from tests.support.trl.dpo import DPO, dataset, pairs, tiny_model


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path, monkeypatch):
    """Redirects the cache of datasets in memory to a temporary directory and returns that."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path / "datasets"


@pytest.fixture
def data(tmp_path):
    return dataset(16, tmp_path / "data")


def trainer_on(data, directory, *, kind=DPOTrainer, reference=None, **options):
    """Returns a trainer and the number of reference calls during its creation."""
    before, models = Counter(fastdpo.calls), (tiny_model(), reference or tiny_model(seed=1))
    trainer = DPO.build(directory, *models, data=data, trainer_class=kind, precompute_ref_log_probs=True, **options)
    return trainer, (fastdpo.calls - before).total()


def values(trainer) -> torch.Tensor:
    columns = trainer.train_dataset
    return torch.tensor([columns["ref_chosen_logps"][:], columns["ref_rejected_logps"][:]])


OPTIONS = {
    "plain": {},
    "ld": dict(ld_alpha=0.5),
    "keep_start": dict(max_length=12),
    "keep_end": dict(max_length=12, truncation_mode="keep_end"),
    "bfloat16": dict(bf16=True),
    "batches": dict(precompute_ref_batch_size=3),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_precomputed_values_equal_those_of_stock(option, data, tmp_path):
    stock, _ = trainer_on(data, tmp_path / "stock", **OPTIONS[option])
    with fastdpo.patched():
        patched, calls = trainer_on(data, tmp_path / "patched", **OPTIONS[option])
    half = option == "bfloat16"
    assert_close(values(patched), values(stock), relative=5 * torch.finfo(torch.bfloat16).eps / 2 if half else RELATIVE)
    assert patched.train_dataset.features == stock.train_dataset.features
    assert patched.train_dataset["prompt_ids"][:] == stock.train_dataset["prompt_ids"][:]
    assert calls == (6 if option == "batches" else 1)


def test_a_second_trainer_and_training_do_not_run_the_reference(data, tmp_path):
    with fastdpo.patched():
        first, calls = trainer_on(data, tmp_path)
        assert calls == 1
        second, calls = trainer_on(data, tmp_path, eval_strategy="no")
        assert calls == 0
        before = Counter(fastdpo.calls)
        second.train()
    assert torch.equal(values(first), values(second))
    assert fastdpo.calls - before == {("trl.DPOTrainer", "policy", "fused"): 3}
    (stored,) = (tmp_path / "data" / "fastdpo-ref-logps").rglob("*.safetensors")
    assert stored.is_file()


def test_batches_are_ordered_longest_first(data, tmp_path, monkeypatch):
    width = lambda result, trainer, model, inputs: inputs["input_ids"].shape[1]  # noqa: E731
    widths = recorded_calls(monkeypatch, DPOTrainer, "compute_ref_log_probs", width)
    with fastdpo.patched():
        trainer_on(data, tmp_path, precompute_ref_batch_size=2)
    assert len(widths) == 8
    assert widths == sorted(widths, reverse=True)


def test_datasets_in_memory_are_cached(tmp_path, cache_of_datasets):
    rows = Dataset.from_list(pairs(16))
    stock, _ = trainer_on(rows, tmp_path)
    with fastdpo.patched():
        first, calls = trainer_on(rows, tmp_path)
        assert calls == 1
        assert len(list(cache_of_datasets.rglob("*.safetensors"))) == 1
        assert trainer_on(Dataset.from_list(pairs(16)), tmp_path)[1] == 0, "the same tokens in another table"
        datasets.disable_caching()
        try:
            assert trainer_on(rows, tmp_path)[1] == 1
        finally:
            datasets.enable_caching()
    assert_close(values(first), values(stock))


def test_existing_columns_are_used(data, tmp_path, caplog):
    with fastdpo.patched():
        first, _ = trainer_on(data, tmp_path)
        columns = ref_logps.RefLogps(torch.arange(16.0), -torch.arange(16.0))
        with caplog.at_level(logging.WARNING, logger="fastdpo"):
            trainer, calls = trainer_on(ref_logps.with_ref_logps(data, columns), tmp_path)
        assert calls == 0
        assert "which are used as they are" in caplog.text
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.train()
    assert values(trainer).tolist() == [columns.chosen.tolist(), columns.rejected.tolist()]
    assert batch["ref_chosen_logps"].shape == (4,)
    assert torch.equal(batch["ref_chosen_logps"], -batch["ref_rejected_logps"])
    assert values(first).max() < 0


def test_evaluation_on_other_data(data, tmp_path):
    other = dataset(6, tmp_path / "other", seed=3)
    stock, _ = trainer_on(data, tmp_path)
    expected = stock.evaluate(other)
    with fastdpo.patched():
        patched, _ = trainer_on(data, tmp_path)
        before = Counter(fastdpo.calls)
        metrics = patched.evaluate({"a": other})
    assert metrics["eval_a_loss"] == approximately(expected["eval_loss"])
    assert fastdpo.calls - before == {
        ("trl.DPOTrainer", "reference", "fused"): 1,
        ("trl.DPOTrainer", "eval", "fused"): 2,
    }


class OwnCollator(DataCollatorForPreference):
    pass


class WithCollator(DPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, data_collator=OwnCollator(pad_token_id=0), **kwargs)


class WithReference(DPOTrainer):
    def compute_ref_log_probs(self, model, inputs):
        chosen, rejected = super().compute_ref_log_probs(model, inputs)
        return chosen + 1, rejected


class WithTransform(DPOTrainer):
    """Its columns hold other answers than its rows."""

    def _prepare_dataset(self, *args, **kwargs):
        rows = super()._prepare_dataset(*args, **kwargs)
        return rows.with_transform(lambda x: {**x, "chosen_ids": [ids[:2] for ids in x["chosen_ids"]]})


SUBCLASSES = {
    WithTransform: "the dataset has a transform",
    WithCollator: "OwnCollator may return other tokens",
    WithReference: "WithReference overrides compute_ref_log_probs",
}


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_subclasses_that_may_change_values_fall_back_to_trl(kind, data, tmp_path, caplog, monkeypatch):
    stock, _ = trainer_on(dataset(16, tmp_path / "other"), tmp_path, kind=kind)
    with fastdpo.patched(), caplog.at_level(logging.WARNING, logger="fastdpo"):
        patched, calls = trainer_on(data, tmp_path, kind=kind)
        assert calls == 4, "TRL's batches, with fused forward passes"
        assert SUBCLASSES[kind] in caplog.text
        assert_close(values(patched), values(stock))
        assert not (tmp_path / "data" / "fastdpo-ref-logps").exists()
        monkeypatch.setenv("FASTDPO_STRICT", "1")
        with pytest.raises(fastdpo.NotFused, match=SUBCLASSES[kind]):
            trainer_on(data, tmp_path, kind=kind)


def test_a_model_that_cannot_be_packed(data, tmp_path):
    """Batches have the same number of pairs as in TRL."""
    stock, _ = trainer_on(dataset(16, tmp_path / "other"), tmp_path, reference=tiny_family("falcon-alibi"))
    with fastdpo.patched():
        patched, calls = trainer_on(data, tmp_path, reference=tiny_family("falcon-alibi"))
    assert calls == 4
    assert_close(values(patched), values(stock))
