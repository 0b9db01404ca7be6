"""`patch(max_tokens=...)` on two ranks: how evenly the tokens of a step are spread over them."""

import numpy as np
import torch

from tests.support.workers import spread
from tests.support.workers.processes import run_ranks

LARGEST = 1.04
"""The tokens of the slower rank in a step, in proportion to their mean: the mean over the steps. TRL's own batches have
up to 1.12.
"""


def test_ranks_compute_about_as_many_tokens_in_a_step(tmp_path):
    run_ranks(2, spread.train_rank, tmp_path)
    of_ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    spreads = {}
    for case in of_ranks[0]:
        tokens = np.array([of_rank[case] for of_rank in of_ranks])  # [ranks, steps]
        assert tokens.shape == (2, spread.STEPS["max_steps"])
        spreads[" ".join(case)] = float((tokens.max(0) / tokens.mean(0)).mean())
    assert max(spreads.values()) < LARGEST, spreads
