"""Sequences that are split across ranks, as context and sequence parallelism do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ... import checks
from ..head.results import SequenceLogps
from ..head.vocabulary_parallel import process_group


@torch.library.custom_op("fastdpo::sum_over_ranks", mutates_args=())
def _sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """The sum of the ranks' tensors. Every rank computes the same loss from it, so the gradient of a
    rank's tensor is that of the sum.

    An operator, since torch 2.11 compiles an all-reduce in an `autograd.Function` to one whose gradient is 0.
    """
    total = x.clone()
    dist.all_reduce(total, group=process_group(group))
    return total


@_sum_over_ranks.register_fake
def _(x, group):
    return torch.empty_like(x)


_sum_over_ranks.register_autograd(lambda ctx, grad: (grad, None))


def merged_sequence_logps(parts: SequenceLogps, *, group: dist.ProcessGroup | None = None) -> SequenceLogps:
    """Summed log-probability of each sequence's targets, from the sums of its parts on several ranks.

    One all-reduce of 16 S bytes, in float64. Each rank holds a part of every sequence and scores it
    with `sequence_logps` or `linear_sequence_logps`, where a part without targets counts as zero.
    The last position of a part predicts the first token of the next one: shift the targets before
    the sequences are split.

    Every rank must compute its loss from the merged sums, since the backward does not communicate.
    It leaves on each rank the gradient of that rank's parts, so the gradient of shared weights is
    the sum over the group. An engine that averages over the group divides by its size; multiply the
    loss by it.

    Args:
        parts: the sums of this rank's part of each sequence, [S] in the same order on every rank.
        group: the ranks that the sequences are split across. Default: all ranks. Without
            `torch.distributed` there is one rank, and its parts are returned.

    Returns:
        `SequenceLogps` with fields [S], equal on all ranks of the group.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; the message names it.
    """
    op = "merged_sequence_logps"
    if not isinstance(parts, SequenceLogps):
        raise TypeError(f"{op}: parts must be a SequenceLogps; got {checks.shown(parts)}")
    checks.require_tensors(op, logps=parts.logps, lengths=parts.lengths)
    given = [list(parts.logps.shape), list(parts.lengths.shape)]
    checks.require(parts.logps.dim() == 1 and given[0] == given[1], op, "parts", "hold two tensors [S]", given)
    is_group = group is None or isinstance(group, dist.ProcessGroup)
    checks.require(is_group, op, "group", "be a process group or None", checks.shown(group), error=TypeError)
    if not (dist.is_available() and dist.is_initialized()):
        return parts
    both = torch.stack([parts.logps.double(), parts.lengths.double()])
    logps, lengths = _sum_over_ranks(both, (group or dist.group.WORLD).group_name)  # pyright: ignore[reportOptionalMemberAccess]
    return SequenceLogps(logps.to(parts.logps.dtype), lengths.long())
