"""One rank that computes `PreferenceMeans` over its part of a batch."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from fastdpo.metrics import PreferenceMeans
from fastdpo.ops import TokenLogps, preference_loss

PAIRS, LENGTH = 7, 9


def update(means: PreferenceMeans, pairs: slice) -> None:
    """Adds the pairs of a slice. All ranks generate the same batch."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.arange(PAIRS)[pairs], PAIRS + torch.arange(PAIRS)[pairs]])
    logps, entropy, logits = torch.randn(3, 2 * PAIRS, LENGTH, generator=generator)
    mask = torch.rand(2 * PAIRS, LENGTH, generator=generator) < torch.rand(2 * PAIRS, 1, generator=generator)
    reference = torch.randn(2 * PAIRS, generator=generator)
    is_top1 = torch.rand(2 * PAIRS, LENGTH, generator=generator) < 0.3
    tokens = TokenLogps(*(x[rows] for x in (logps, entropy, logits, is_top1)))
    if not len(rows):
        return
    chosen, rejected = (logps * mask).sum(1)[rows].chunk(2)
    loss = preference_loss(chosen, rejected, *reference[rows].chunk(2))
    means.update_pairs(loss, chosen, rejected)
    means.update_tokens(tokens, mask[rows])


def reduce_rank(directory: Path) -> None:
    """Writes the means and the number of collectives to a file in the directory."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    collectives = []
    stock = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: collectives.append(1) or stock(*args, **kwargs)
    means = PreferenceMeans()
    bounds = {2: [0, 2, 7], 3: [0, 4, 7, 7]}[world]  # uneven; the last of three ranks has no data
    for pair in range(bounds[rank], bounds[rank + 1]):  # one pair per step, so ranks take different numbers of steps
        update(means, slice(pair, pair + 1))
    result = means.compute()
    (directory / f"rank{rank}.json").write_text(json.dumps({"means": result, "collectives": len(collectives)}))
