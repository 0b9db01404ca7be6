"""`patch(max_tokens=...)`: TRL's DPOTrainer with the same pairs in each step, cut by a budget of tokens."""

import contextlib
import functools
from dataclasses import dataclass

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

import fastdpo
from fastdpo.batching import StepPlanner
from fastdpo.integrations.trl.gathering import StepMetrics
from fastdpo.integrations.trl.max_tokens import budgeted_loader
from fastdpo.lengths import PairLengths
from fastdpo.models import calls as counters
from tests.support.comparison import double
from tests.support.trl.dpo import adapter, assert_same, build, long_pairs, pairs, tiny_model, train
from tests.support.trl.resuming import assert_resumes

MAX_TOKENS = 120  # three or more micro-batches of 8 pairs, of different numbers of pairs
RAGGED = long_pairs() * 2  # 16 pairs: two steps in each of two epochs
STEP = dict(per_device_train_batch_size=8, max_steps=4, data=RAGGED)


def run(directory, patched: bool, max_tokens=MAX_TOKENS, reference=True, cast=lambda model: model, **options):
    """Trains stock, or with a budget of tokens."""
    models = [cast(tiny_model(seed=seed)) for seed in range(1 + reference)]
    train_once = functools.partial(train, directory, models[0], models[1] if reference else None, **options)
    if not patched:
        return train_once()
    with fastdpo.patched("trl.DPOTrainer", max_tokens=max_tokens):
        return train_once()


def assert_same_as_stock(directory, expected: dict, *, max_tokens: int = MAX_TOKENS, **options):
    """Compares a run with a budget with one of stock, whose options are `expected`."""
    stock = run(directory / "stock", False, **expected)
    stock.in_float64 = lambda: run(directory / "float64", False, cast=double, **expected)
    budgeted = run(directory / "budgeted", True, max_tokens, **options)
    assert_same(stock, budgeted)
    return budgeted


@pytest.fixture
def computed(monkeypatch):
    """The packed tokens of every call of a model."""
    tokens = []
    count = counters.count_tokens

    def counting(*counts):
        tokens.append(counts[-1])
        count(*counts)

    monkeypatch.setattr(counters, "count_tokens", counting)
    return tokens


class Listed(DPOTrainer):
    def get_train_dataloader(self):
        self.train_dataset = list(self.train_dataset)
        return super().get_train_dataloader()


# option: what stock trains with, what the budget changes
OPTIONS = {
    "full": (STEP, {}),
    "one_micro_batch": (STEP, dict(max_tokens=10_000)),
    "accumulation": (STEP, dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)),
    "fewer_micro_batches_than_accumulated": (
        STEP,
        dict(per_device_train_batch_size=1, gradient_accumulation_steps=8, max_tokens=300),
    ),
    "last_step_is_partial": (
        dict(per_device_train_batch_size=12, max_steps=4, data=RAGGED),
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=3),  # 4, 4, 4, then 4 pairs
    ),
    "adapter": (dict(STEP, **adapter()), {}),
    "truncation": (dict(STEP, max_length=12), dict(max_tokens=80)),
    "precomputed": (dict(STEP, precompute_ref_log_probs=True), {}),
    "worker_processes": (dict(STEP, dataloader_num_workers=1, max_steps=2), {}),
    "evaluation": (dict(STEP, evaluate=6, eval_strategy="steps", eval_steps=1), {}),
    "logged_later": (dict(STEP, logging_steps=3), {}),
    "length_normalized_and_weighted": (dict(STEP, loss_type=["ipo", "hinge"], loss_weights=[0.5, 1.0]), {}),
    "weighting": (dict(STEP, use_weighting=True), {}),
    "input_tokens": (dict(STEP, include_num_input_tokens_seen="non_padding"), {}),
    "sequential": (dict(STEP, train_sampling_strategy="sequential"), {}),
    "list": (dict(STEP, trainer_class=Listed), {}),
    "data_seed": (dict(STEP, data_seed=7, accelerator_config={"use_seedable_sampler": False}), {}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_same_training(tmp_path, computed, option):
    expected, changes = OPTIONS[option]
    max_tokens = changes.get("max_tokens", MAX_TOKENS)
    budgeted = assert_same_as_stock(tmp_path, expected, **{**expected, **changes})
    assert {path for _, path in budgeted.calls} == {"fused"}
    if "evaluate" not in expected and "precompute_ref_log_probs" not in expected:
        assert max(computed) <= max_tokens
    if max_tokens == MAX_TOKENS:
        assert max(computed) > MAX_TOKENS / 2
        assert budgeted.calls["policy", "fused"] > budgeted.steps


def test_group_by_length(tmp_path):
    rows = [{**row, "length": len((row["prompt"] + row["chosen"]).split())} for row in RAGGED]
    options = dict(STEP, train_sampling_strategy="group_by_length", remove_unused_columns=False) | dict(data=rows)
    assert_same_as_stock(tmp_path, options, **options)


def test_a_wrong_share_is_noticed(tmp_path, monkeypatch):
    def wrong(cut):
        return [[x._replace(share=1 / len(of_rank)) for x in of_rank] for of_rank in shares(cut)]

    shares = budgeted_loader.shared_among_ranks
    monkeypatch.setattr(budgeted_loader, "shared_among_ranks", wrong)
    with pytest.raises(AssertionError):
        assert_same_as_stock(tmp_path, STEP, **STEP)


def test_metrics_that_are_not_joined_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(StepMetrics, "micro_batch", lambda *args: contextlib.nullcontext())
    with pytest.raises(AssertionError):
        assert_same_as_stock(tmp_path, STEP, **STEP)


class Reads(DPOTrainer):
    """A subclass that computes metrics, so that it sees them after each micro-batch."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        for values in self._metrics["train"].values():
            assert all(type(x) in (int, float) for x in values)
        return loss


def test_metrics_that_are_read_in_every_micro_batch(tmp_path):
    options = dict(STEP, trainer_class=Reads, logging_steps=2)
    assert_same_as_stock(tmp_path, options, **options)


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_resuming(tmp_path, sampling):
    """Stops in the second epoch, and continues in another trainer."""
    rows = [{**row, "length": len(row["prompt"].split())} for row in pairs(20)]
    options = dict(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,  # 8, 8 and 4 pairs: three steps an epoch
        train_sampling_strategy=sampling,
        remove_unused_columns=False,
    )
    fastdpo.patch("trl.DPOTrainer", max_tokens=MAX_TOKENS)
    assert_resumes(tmp_path, rows, **options)


def test_the_budget_bounds_what_is_computed_under_dropout(tmp_path, computed):
    calls = {}
    for share in (True, "deterministic", False):
        with fastdpo.patched("trl.DPOTrainer", max_tokens=MAX_TOKENS, share_prompts=share):
            options = dict(STEP, peft_config=adapter(lora_dropout=0.2)["peft_config"], disable_dropout=False)
            result = train(tmp_path / str(share), tiny_model(), None, **options)
        assert MAX_TOKENS / 2 < max(computed) <= MAX_TOKENS
        computed.clear()
        assert {path for _, path in result.calls} == {"fused"}
        calls[share] = result.calls["policy", "fused"]
    assert calls[True] < calls["deterministic"] == calls[False]


@pytest.mark.parametrize("splits", [False, True])
def test_ranks_have_the_pairs_that_accelerate_draws(splits):
    """Two ranks with 4 pairs each, of batches of 4 pairs or split batches of 8."""
    lengths = PairLengths(*torch.tensor([[9], [8], [5], [4], [4], [4]]).expand(6, 40).numpy())

    def loader(rank):
        pairs = DataLoader(list(range(40)), 8 if splits else 4, shuffle=True, collate_fn=list)
        options = dict(split_batches=splits, use_seedable_sampler=True, data_seed=3)
        return prepare_data_loader(pairs, num_processes=2, process_index=rank, **options)

    def budgeted(rank):
        planner = StepPlanner(lengths, 36, ranks=2)
        items = budgeted_loader.with_token_budget(loader(rank), planner, 1, rank)
        return [[pair for pairs, _ in item for pair in pairs] for item in items]

    stock = [a + b for a, b in zip(loader(0), loader(1), strict=True)]
    by_budget = [a + b for a, b in zip(budgeted(0), budgeted(1), strict=True)]
    assert len(stock) == 5
    assert list(map(sorted, by_budget)) == list(map(sorted, stock))


class Unpatches(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        fastdpo.unpatch()


def test_unpatching_during_training_keeps_the_steps(tmp_path):
    losses = []
    for patched in (False, True):
        if patched:
            fastdpo.patch("trl.DPOTrainer", max_tokens=MAX_TOKENS)
        trainer = build(
            tmp_path / str(patched), tiny_model(), tiny_model(seed=1), 16, per_device_train_batch_size=8, max_steps=4
        )
        trainer.add_callback(Unpatches())
        trainer.train()
        losses.append(torch.tensor([log["loss"] for log in trainer.state.log_history[:-1]]))
        assert not isinstance(next(iter(trainer.get_train_dataloader())), list)
    torch.testing.assert_close(*losses)


@dataclass
class UnknownCollator:
    collator: DataCollatorForPreference

    def __call__(self, examples):
        return self.collator(examples)


def stream(directory):
    return IterableDataset.from_generator(functools.partial(iter, pairs(8)))


class SumOverPairs(DPOTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs) * len(inputs["input_ids"]) / 2


class RankedReference(DPOTrainer):
    def compute_ref_log_probs(self, model, inputs):
        chosen, rejected = super().compute_ref_log_probs(model, inputs)
        return chosen - chosen.mean(), rejected


class OwnSteps(DPOTrainer):
    def training_step(self, model, inputs, *args):
        return self.compute_loss(model, self._prepare_inputs(inputs))


REFUSED = {
    "a pair with more tokens": (
        dict(),
        "max_tokens must be at least the distinct tokens of every pair; got 20, but pair",
    ),
    "streaming": (dict(data=stream), "streaming datasets"),
    "dispatch_batches": (dict(accelerator_config={"dispatch_batches": True}), "dispatch_batches=True"),
    "batch_rebalance": (
        dict(train_sampling_strategy="batch_rebalance", remove_unused_columns=False),
        "train_sampling_strategy='batch_rebalance'",
    ),
    "auto_find_batch_size": (dict(auto_find_batch_size=True), "auto_find_batch_size=True"),
    "aot": (dict(loss_type="aot"), "loss_type='aot', which is not a mean over pairs"),
    "sft": (dict(loss_type=["sigmoid", "sft"]), "loss_type='sft'"),
    "collator": (
        dict(data_collator=UnknownCollator(DataCollatorForPreference(0))),
        "the data collator UnknownCollator, whose truncation is not known",
    ),
    **{
        kind.__name__: (
            dict(trainer_class=kind),
            f"{kind.__name__}, which overrides the loss or the steps of DPOTrainer",
        )
        for kind in (SumOverPairs, RankedReference, OwnSteps)
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(tmp_path, case):
    changes, message = REFUSED[case]
    data = changes.get("data", lambda directory: Dataset.from_list([{**row, "length": 3} for row in pairs(8)]))
    options = {**STEP, **changes, "data": data(tmp_path)}
    max_tokens = 20 if case == "a pair with more tokens" else MAX_TOKENS
    error = ValueError if case == "a pair with more tokens" else NotImplementedError
    before = sum(fastdpo.calls.values())
    with pytest.raises(error, match=f"^patch: .*{message}"):
        run(tmp_path, True, max_tokens, **options)
    assert sum(fastdpo.calls.values()) == before
