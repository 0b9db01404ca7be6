"""`patch(group_prompts=...)`: pairs that begin alike in one batch of TRL's DPOTrainer, and the same epochs."""

import functools
import random
from collections import Counter

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader, RandomSampler

import fastdpo
from fastdpo.batching import Kinship
from fastdpo.integrations.grouped_epochs import GroupedSampler
from tests.support.trl.dpo import build, long_pairs, recorded_layouts, tiny_model, train
from tests.support.trl.grouping import assert_steps_are_those_of_stock, conversations
from tests.support.trl.resuming import assert_resumes

COUNTS = 4, 3, 2, 2, 1, 4, 3, 1  # pairs of each prompt
MAX_TOKENS = 200


def pairs_of_prompts(prompt: int = 12) -> list[dict[str, str]]:
    """20 pairs, those of a prompt far from each other."""
    prompts = [row["prompt"] for row in long_pairs(((prompt, 1, 1),) * len(COUNTS))]
    answers = long_pairs(tuple((1, 2 + i % 4, 1 + i % 3) for i in range(sum(COUNTS))))
    repeated = [prompt for prompt, count in zip(prompts, COUNTS, strict=True) for _ in range(count)]
    rows = [{**answer, "prompt": prompt} for prompt, answer in zip(repeated, answers, strict=True)]
    return random.Random(0).sample(rows, len(rows))


@pytest.fixture
def layouts(monkeypatch):
    return recorded_layouts(monkeypatch)


def epochs_of(directory, seed=42, n=2, kind=Dataset.from_list, **options) -> list[list[list[tuple]]]:
    """The prompts and chosen answers in each batch of each epoch, in the order of training."""
    options = dict(per_device_train_batch_size=4, seed=seed) | options
    trainer = build(directory, tiny_model(), tiny_model(seed=1), **options)
    data = Dataset.from_list(pairs_of_prompts())
    prepared = trainer._prepare_dataset(data, trainer.processing_class, trainer.args, "train")
    trainer.train_dataset = kind(list(prepared))
    loader = trainer.get_train_dataloader()
    epochs = []
    for epoch in range(n):
        loader.set_epoch(epoch)
        items = [[x[0] for x in item] if isinstance(item, list) else [item] for item in loader]
        epochs.append([list(map(tuple, batch["input_ids"].tolist())) for item in items for batch in item])
    return epochs


def test_a_list_has_the_epochs_of_a_dataset(tmp_path):
    with fastdpo.patched("trl.DPOTrainer", group_prompts=True):
        assert epochs_of(tmp_path / "list", kind=list) == epochs_of(tmp_path / "dataset")


def chosen_rows(batches: list[list[tuple]]) -> Counter:
    """The rows of an epoch without their padding."""
    return Counter(tuple(token for token in row if token) for batch in batches for row in batch)


def prompts_in(batch: list[tuple], n: int = 12) -> int:
    return len({row[:n] for row in batch})


@pytest.mark.parametrize("max_tokens", [None, MAX_TOKENS])
@pytest.mark.parametrize("sampling", ["random", "sequential"])
def test_epochs_have_the_same_pairs(tmp_path, max_tokens, sampling):
    options = dict(train_sampling_strategy=sampling)
    stock = epochs_of(tmp_path / "stock", **options)
    with fastdpo.patched("trl.DPOTrainer", group_prompts=True, max_tokens=max_tokens):
        grouped = epochs_of(tmp_path / "grouped", **options)
        again = epochs_of(tmp_path / "again", **options)
        other = epochs_of(tmp_path / "other", seed=7, **options)
    for before, after in zip(stock, grouped, strict=True):
        assert chosen_rows(after) == chosen_rows(before)
    assert grouped == again
    if sampling == "random":
        assert grouped[0] != grouped[1]
        assert grouped != other
    if max_tokens is None:
        assert [len(batch) for batch in grouped[0]] == [len(batch) for batch in stock[0]]
        before, after = (sum(map(prompts_in, epochs[0])) for epochs in (stock, grouped))
        assert after <= len(COUNTS) + 2 < before


def run(directory, data, **patch):
    options = dict(per_device_train_batch_size=4, num_train_epochs=1, max_steps=-1, data=data)
    with fastdpo.patched("trl.DPOTrainer", **patch):
        return train(directory, tiny_model(), tiny_model(seed=1), **options)


@pytest.mark.parametrize("max_tokens", [None, MAX_TOKENS])
def test_more_tokens_are_saved(tmp_path, layouts, max_tokens):
    computed = []
    for grouping in (False, True):
        result = run(tmp_path / str(grouping), pairs_of_prompts(), group_prompts=grouping, max_tokens=max_tokens)
        assert result.steps == 5
        assert {path for _, path in result.calls} == {"fused"}
        computed.append(sum(len(layout.token_index) for layout in layouts))
        assert max_tokens is None or max(len(layout.token_index) for layout in layouts) <= max_tokens
        assert not grouping or max(int(layout.multiplicity.max()) for layout in layouts) > 2
        layouts.clear()
    assert computed[1] < 0.85 * computed[0]


def test_steps_are_those_of_stock_with_the_same_pairs(tmp_path, monkeypatch):
    assert_steps_are_those_of_stock(tmp_path, monkeypatch)


@pytest.mark.parametrize("max_tokens", [None, MAX_TOKENS])
def test_turns_of_conversations_share_more(tmp_path, layouts, max_tokens):
    computed = []
    for grouping in (False, True):
        run(tmp_path / str(grouping), conversations(), group_prompts=grouping, max_tokens=max_tokens)
        computed.append(sum(len(layout.token_index) for layout in layouts))
        layouts.clear()
    assert computed[1] < 0.75 * computed[0]


@pytest.mark.parametrize("max_tokens", [None, MAX_TOKENS])
def test_resuming(tmp_path, max_tokens):
    """Stops after three of five steps of the first epoch."""
    fastdpo.patch("trl.DPOTrainer", group_prompts=True, max_tokens=max_tokens)
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert_resumes(tmp_path, pairs_of_prompts(), **options)


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree(ranks, seedable):
    prompts = torch.arange(64).remainder(16).numpy()
    kinship = Kinship([[prompt] * 9 + [i] for i, prompt in enumerate(prompts)])
    of_ranks = []
    for rank in range(ranks):
        torch.manual_seed(0)
        loader = DataLoader(list(range(64)), 4, sampler=RandomSampler(range(64)), collate_fn=list)
        mine = prepare_data_loader(
            loader, num_processes=ranks, process_index=rank, use_seedable_sampler=seedable, data_seed=3
        )
        batches = mine.batch_sampler.batch_sampler
        batches.sampler = GroupedSampler(batches.sampler, kinship, 4)
        of_ranks.append(list(mine))
    drawn = [batch for batches in of_ranks for batch in batches]
    assert sorted(pair for batch in drawn for pair in batch) == list(range(64))
    assert all(len({int(prompts[pair]) for pair in batch}) == 1 for batch in drawn)


REFUSED = {
    "streaming datasets": dict(data=IterableDataset.from_generator(functools.partial(iter, pairs_of_prompts()))),
    "dispatch_batches=True": dict(accelerator_config={"dispatch_batches": True}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_before_training(tmp_path, reason):
    options = {"data": pairs_of_prompts(), **REFUSED[reason]}
    with (
        fastdpo.patched("trl.DPOTrainer", group_prompts=True),
        pytest.raises(NotImplementedError, match=rf"^patch: group_prompts does not support {reason}"),
    ):
        train(tmp_path, tiny_model(), tiny_model(seed=1), **options)
