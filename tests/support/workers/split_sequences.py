"""One rank of a loss over sequences that are split across ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fastdpo import ops

LENGTHS = (7, 4, 9, 2)
STARTS_OF_PARTS = ((0, 0, 0, 0), (3, 4, 0, 1))
"""Of each sequence, where the part of each of two ranks starts. One part of either rank is empty."""

VOCABULARY, HIDDEN = 23, 6


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight in float64, and targets, of all sequences one after the other."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    hidden, weight = (
        torch.randn(n, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_() for n in (tokens, VOCABULARY)
    )
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    targets[::4] = -100
    return hidden, weight, targets


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def loss_of(sums: ops.SequenceLogps) -> Tensor:
    """A DPO loss of two pairs, normalized by lengths, so that it is not linear in the sums."""
    chosen, rejected = (sums.logps / sums.lengths).chunk(2)
    return -torch.nn.functional.logsigmoid(chosen - rejected).sum()


def score_part(directory: Path, compiled: bool) -> None:
    """Writes the merged sums, the loss and this rank's gradients to a file in the directory."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    ends = (*STARTS_OF_PARTS[1:], LENGTHS)[rank]
    spans = list(zip(bounds(LENGTHS)[:-1].tolist(), STARTS_OF_PARTS[rank], ends, strict=True))
    index = torch.cat([torch.arange(offset + start, offset + end) for offset, start, end in spans])
    hidden, weight, targets = inputs()
    cu_seqlens = bounds(tuple(end - start for _, start, end in spans))

    def merged(hidden: Tensor, weight: Tensor) -> ops.SequenceLogps:
        parts = ops.linear_sequence_logps(hidden, weight, targets[index], cu_seqlens)
        return ops.merged_sequence_logps(parts)

    if compiled:
        merged = torch.compile(merged, fullgraph=True, backend="aot_eager")
    sums = merged(hidden[index], weight)
    loss = loss_of(sums)
    loss.backward()
    result = {"sums": tuple(x.detach() for x in sums), "loss": loss.detach()}
    gradients = {"hidden": hidden.grad, "weight": weight.grad}
    torch.save(result | gradients, directory / f"rank{os.environ['RANK']}.pt")
