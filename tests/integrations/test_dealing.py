"""`patch(max_tokens=...)`: pairs that are dealt to the ranks by their tokens, in the batches that accelerate draws."""

from itertools import chain

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from fastdpo.integrations.trl.max_tokens.dealing import deal

SIZES = np.random.default_rng(0).lognormal(4, 0.6, 70).astype(int) + 1
"""The tokens of pairs, of which the last step of an epoch has fewer than the others."""
COLUMNS = ("chosen_ids", "rejected_ids")
PAIRS = [dict(i=i, chosen_ids=[1] * size, rejected_ids=[1]) for i, size in enumerate(SIZES)]
ACCUMULATION = 2


def loader(rank: int, ranks: int, splits: bool = False, dealt: bool = True, pairs=PAIRS) -> DataLoader:
    """The loader of a rank, with batches of 4 pairs, or batches of all ranks that are split."""
    size = 4 * ranks if splits else 4
    drawn = DataLoader(pairs, size, shuffle=True, collate_fn=lambda pairs: [pair["i"] for pair in pairs])
    options = dict(split_batches=splits, use_seedable_sampler=True, data_seed=3)
    made = prepare_data_loader(drawn, num_processes=ranks, process_index=rank, **options)
    if dealt:
        deal(made, COLUMNS, ACCUMULATION)
    return made


def epoch(ranks: int, epoch: int = 0, **options) -> list[tuple[list[int], ...]]:
    """The batches of all ranks at each position."""
    loaders = [loader(rank, ranks, **options) for rank in range(ranks)]
    for of_rank in loaders:
        of_rank.set_epoch(epoch)
    return list(zip(*loaders, strict=True))


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_position_has_the_pairs_that_accelerate_draws(ranks, splits):
    stock, dealt = (epoch(ranks, splits=splits, dealt=dealt) for dealt in (False, True))
    assert len(stock) == -(-len(PAIRS) // (4 * ranks))
    assert [[len(batch) for batch in x] for x in dealt] == [[4] * ranks] * len(stock)
    assert [sorted(chain(*x)) for x in dealt] == [sorted(chain(*x)) for x in stock]
    assert epoch(ranks, epoch=1, splits=splits) != dealt == epoch(ranks, splits=splits)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_about_as_many_tokens_in_a_step(ranks):
    spreads = []
    for dealt in (False, True):
        tokens = np.array([[SIZES[batch].sum() for batch in x] for x in epoch(ranks, dealt=dealt)])
        steps = tokens[: len(tokens) // ACCUMULATION * ACCUMULATION].reshape(-1, ACCUMULATION, ranks).sum(1)
        spreads.append((steps.max(1) / steps.mean(1)).mean())
    assert spreads[1] < 1.05 < spreads[0]


def test_an_epoch_that_is_resumed():
    of_rank = [batches[1] for batches in epoch(2)]
    assert list(skip_first_batches(loader(1, 2), 3)) == of_rank[3:]


def test_loaders_that_stay_as_they_are():
    """On one rank, and without the columns."""
    for ranks, pairs in ((1, PAIRS), (2, [dict(i=i) for i in range(9)])):
        assert epoch(ranks, pairs=pairs) == epoch(ranks, pairs=pairs, dealt=False)
