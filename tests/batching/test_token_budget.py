"""Steps cut by a budget of tokens: nothing is lost, nothing is too long, and ranks are balanced."""

import itertools

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch.utils.data import DataLoader

from fastdpo.batching import CostModel, StepPlanner, TokenBudgetSampler
from fastdpo.lengths import PairLengths, pair_lengths
from fastdpo.ops import pack_pairs
from tests.support.trl.dpo import tiny_model
from tests.support.trl.reward import reward_model

SIZES = [(1, 0.1), (2, 0.6), (4, 1.2)]
"""Ranks, and the spread of the logarithm of lengths: nearly equal, as in datasets, a long tail."""


def lengths_of(n: int, spread: float = 0.6, seed: int = 0) -> PairLengths:
    rng = np.random.default_rng(seed)
    prompt, chosen, rejected = rng.lognormal(4, spread, (3, n)).clip(2, 900).astype(np.int64)
    return PairLengths(prompt + chosen, prompt + rejected, chosen, rejected, prompt, 0 * prompt)


def flat(cut: list) -> list[int]:
    return [pair for of_ranks in cut for pairs in of_ranks for pair in pairs]


@pytest.mark.parametrize(("ranks", "spread"), SIZES)
def test_a_step_is_cut(ranks, spread):
    lengths = lengths_of(512, spread)
    planner = StepPlanner(lengths, 3000, ranks=ranks)
    for pairs in np.random.default_rng(1).permutation(512).reshape(-1, 64):
        cut = planner.cut(pairs)
        assert sorted(flat(cut)) == sorted(pairs.tolist())
        assert all(len(of_ranks) == ranks and all(of_ranks) for of_ranks in cut)
        assert all(planner.tokens_of(micro_batch) <= 3000 for of_ranks in cut for micro_batch in of_ranks)
        fewest = -(-planner.tokens_of(pairs) // (3000 * ranks))
        assert len(cut) <= fewest + 1
        assert cut == planner.cut(pairs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_balanced(ranks):
    """Steps of 32 pairs a rank. Fixed batches of a random order are the comparison."""
    lengths = lengths_of(2048)
    planner = StepPlanner(lengths, 4096, ranks=ranks, cost=CostModel(1.0, 1 / 6000))
    size = 32 * ranks
    by_budget, fixed = [], []
    for pairs in np.random.default_rng(1).permutation(2048).reshape(-1, size):
        costs = np.array([[planner.cost_of(x) for x in of_ranks] for of_ranks in planner.cut(pairs)])
        by_budget.append((costs.sum(0).max() / costs.sum(0).mean(), costs.max() / costs.mean()))
        of_ranks = [planner.cost_of(x) for x in pairs.reshape(ranks, -1)]
        fixed.append(np.max(of_ranks) / np.mean(of_ranks))
    assert np.max([total for total, _ in by_budget]) < 1.02
    assert np.mean([largest for _, largest in by_budget]) < 1.05
    assert np.mean(fixed) > 1.04


def test_best_fit_where_balance_needs_more_room():
    lengths = PairLengths(*np.array([[5, 5, 4, 4, 3, 3], [1] * 6, [4, 4, 3, 3, 2, 2], [0] * 6, [1] * 6, [0] * 6]))
    planner = StepPlanner(lengths, 11)  # 4 + 4 + 3 + 3 + 2 + 2 + shared ones fit in two, if not one at a time
    assert [planner.tokens_of([i]) for i in range(6)] == [4, 4, 3, 3, 2, 2]
    assert len(planner.cut(range(6))) == 2


def test_ranks_never_have_empty_micro_batches():
    lengths = lengths_of(4)
    planner = StepPlanner(lengths, int(lengths.packed().max()), ranks=4)
    assert [len(pairs) for of_ranks in planner.cut(range(4)) for pairs in of_ranks] == [1] * 4


COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


def padded(rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids, mask and labels of a batch, chosen rows first."""
    parts = [[row["prompt_ids"], row[name]] for name in COLUMNS[1:] for row in rows]
    width = max(len(p) + len(a) for p, a in parts)
    ids = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in parts])
    labels = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in parts])
    return ids, ids != 0, labels


def test_tokens_are_those_of_layouts():
    rng = np.random.default_rng(0)
    rows = [{n: rng.integers(3, 9, rng.integers(1, 12)).tolist() for n in COLUMNS} for _ in range(20)]
    planner = StepPlanner(pair_lengths(rows), 100)
    for (micro_batch,) in planner.cut(range(20)):
        layout = pack_pairs(*padded([rows[i] for i in micro_batch]))
        assert len(layout.token_index) == planner.tokens_of(micro_batch) <= 100


def sampler(ranks: int = 1, n: int = 100, **options) -> TokenBudgetSampler:
    return TokenBudgetSampler(lengths_of(n), 1500, 16, ranks=ranks, **options)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_epoch_has_every_pair_and_the_shares_of_a_mean(ranks):
    batches = sampler(ranks)
    drawn = list(itertools.chain.from_iterable(batches))
    assert sorted(drawn) == sorted(range(100))  # 100 = 6 * 16 + 4, which all of these ranks divide
    assert len(batches) == len(list(batches))
    order = np.random.default_rng((0, 0)).permutation(100)
    for k, steps in enumerate(zip(*(batches.steps(rank) for rank in range(ranks)), strict=True)):
        micro_batches = [x for step in steps for x in step]
        assert len({len(step) for step in steps}) == 1
        assert sorted(i for x in micro_batches for i in x.pairs) == sorted(order[16 * k : 16 * (k + 1)])
        values = np.arange(100.0)
        of_ranks = [sum(values[x.pairs].mean() * x.share for x in step) for step in steps]
        assert np.mean(of_ranks) == pytest.approx(values[order[16 * k : 16 * (k + 1)]].mean())


def test_steps_that_ranks_do_not_divide_are_filled_or_dropped():
    everything = list(itertools.chain.from_iterable(sampler(4, n=99)))
    assert len(everything) == 100
    assert set(everything) == set(range(99))
    assert len(list(itertools.chain.from_iterable(sampler(4, n=99, drop_last=True)))) == 96


def test_epochs_differ_and_are_reproducible():
    a, b = sampler(seed=3), sampler(seed=3)
    first = list(a)
    assert first == list(b) == list(a)
    a.set_epoch(1)
    assert list(a) != first
    b.set_epoch(1)
    assert list(a) == list(b)
    assert list(sampler(seed=4)) != first
    assert max(next(iter(sampler(order=lambda epoch: range(100))))) < 16


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_accelerate_gives_each_rank_its_micro_batches(ranks):
    whole = sampler(ranks)
    for rank in range(ranks):
        mine = list(sampler(ranks, rank=rank))
        assert mine == [x.pairs for step in whole.steps(rank) for x in step]
        shard = BatchSamplerShard(sampler(ranks), ranks, rank)
        assert list(shard) == mine
        assert len(shard) == len(mine)


def test_skipping_batches_resumes_the_epoch():
    dataset = list(range(100))
    loader = DataLoader(dataset, batch_sampler=sampler(2), collate_fn=list)
    mine = prepare_data_loader(loader, num_processes=2, process_index=1)
    batches = list(mine)
    assert batches == list(sampler(2, rank=1))
    assert list(skip_first_batches(mine, 3)) == batches[3:]


def test_costs_are_operations_of_the_model():
    model = tiny_model()
    cost = CostModel.of_model(model)
    config = model.config
    layers = sum(x.numel() for name, x in model.named_parameters() if "layers" in name or "model.norm" in name)
    assert cost.token == 2 * layers
    assert cost.scored == 2 * config.hidden_size * config.vocab_size
    assert cost.attended == 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    pair = PairLengths(*np.array([[6], [5], [3], [2], [3], [0]]))  # needs P P P C C and P P P R
    assert pair.attended().tolist() == [15 + 4]
    assert pair.attended(share=False).tolist() == [15 + 10]
    assert cost.costs(pair)[0] == 6 * cost.token + 19 * cost.attended + 5 * cost.scored


def test_a_reward_model_has_no_lm_head_that_costs():
    cost, model = CostModel.of_model(tiny_model()), reward_model()
    assert CostModel.of_model(model).scored == 0
    assert CostModel.of_model(model).token == cost.token + 2 * model.score.weight.numel()


LENGTHS = lengths_of(8)
MALFORMED = [
    (dict(max_tokens=0), ValueError, "max_tokens must be a positive integer; got 0"),
    (dict(max_tokens=1e6), TypeError, "max_tokens must be a positive integer; got 1000000.0"),
    (
        dict(max_tokens=9),
        ValueError,
        "max_tokens must be at least the distinct tokens of every pair; got 9, but pair 0",
    ),
    (dict(ranks=0), ValueError, "ranks must be a positive integer; got 0"),
    (dict(pairs_per_step=3, ranks=2), ValueError, r"pairs_per_step must be a positive multiple of the number of ranks"),
    (dict(rank=2, ranks=2), ValueError, "rank must be None or an integer from 0 to 1; got 2"),
    (dict(seed=-1), ValueError, "seed must be an integer that is not negative; got -1"),
    (dict(drop_last="no"), TypeError, "drop_last must be True or False; got 'no'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), MALFORMED)
def test_malformed_arguments(changes, error, message):
    arguments = dict(max_tokens=10_000, pairs_per_step=2) | changes
    with pytest.raises(error) as raised:
        TokenBudgetSampler(LENGTHS, **arguments)
    assert str(raised.value).startswith(f"TokenBudgetSampler: {message}")


def test_malformed_steps_and_costs():
    planner = StepPlanner(LENGTHS, 10_000, ranks=2)
    for pairs in ([], [0, 1, 2]):
        with pytest.raises(ValueError, match=r"^StepPlanner: pairs must be a positive number of pairs that 2 ranks"):
            planner.cut(pairs)
    with pytest.raises(ValueError, match=r"^CostModel: token must be positive; got 0"):
        CostModel(token=0)
    with pytest.raises(ValueError, match=r"^CostModel: attended must be a finite number that is not negative; got -1"):
        CostModel(attended=-1)
