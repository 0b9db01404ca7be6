"""Packed batches that the ranks of a group hold in parts (Ulysses, arXiv 2309.14509).

Every rank packs the same batch and runs the layers on t consecutive tokens of it. Around attention, ranks exchange
tokens for heads, so that each computes all tokens of h heads by the call and the backend that one process would take.
The scored states go to the ranks in equal numbers, because those of long prompts all lie at the end. Their results go
to all ranks, which compute the same loss.

The gradients of a rank are those of its tokens, times P: their mean over the group is the gradient of the batch, and
engines that train on several ranks take the mean.

Dimensions: P ranks, T packed tokens, t = T / P, H query heads, H_kv key heads, h heads of a rank, N scored positions,
n = N / P, rounded up.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...ops.head.results import TokenLogps
from ...packing import Layout

_REFUSED = 2**62
"""In an agreement, the number of a rank that does not run the call. Those of batches are smaller."""


class SequenceGroup:
    """The ranks that hold the parts of a batch. There is one object for each process group.

    Attributes:
        group: of processes.
        rank: of this process in it.
        ranks: P.
        agreements: number of calls of `agree`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.agreements = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> SequenceGroup:
        known = next((x for x in _groups if x.group is group), None)
        if known is None:
            _groups.append(known := cls(group))
        return known

    def __deepcopy__(self, memo: dict) -> SequenceGroup:
        return self

    def is_within(self, ranks: Iterable[int]) -> bool:
        """Whether all ranks of the group are among these ranks of the world."""
        return set(ranks).issuperset(dist.get_process_group_ranks(self.group))

    def rounded_up(self, tokens: int) -> int:
        """The next number of tokens that the ranks divide."""
        return -(-tokens // self.ranks) * self.ranks

    def mask(self, layout: Layout) -> Tensor:
        """`Layout.mask`, expanded to a shape [1, G, S, 4] whose G says that attention is split, and in which group.

        Checkpoints keep the shape, and recomputation runs outside of any context.
        """
        return layout.mask.expand(1, _groups.index(self) + 2, -1, -1)

    def agree(self, refused: bool, digest: Tensor) -> bool:
        """Whether no rank refuses a call and all have the same digest, int64 []. One exchange of 16 bytes."""
        self.agreements += 1
        own = torch.full_like(digest, _REFUSED) if refused else digest
        both = torch.stack([own, -own])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
        largest, negated = both.tolist()
        return largest != _REFUSED and largest == -negated


_groups: list[SequenceGroup] = []


def digest_of(layout: Layout, ids: Tensor) -> Tensor:
    """A hash of all that a call computes of a batch, int64 [] below 2**62 on the device of the ids, without a
    synchronization.
    """
    of_host = (layout.padded_shape, layout.output_shape, torch.is_grad_enabled(), layout.rows.tolist())
    numbers = [ids.flatten()[layout.token_index], layout.position_ids, layout.score_index, layout.targets]
    numbers += [layout.output_index, layout.output_source]
    x = torch.cat([each.long() for each in numbers])
    x = (x + zlib.crc32(repr(of_host).encode())) * 0x2545F4914F6CDD1D + torch.arange(len(x), device=x.device)
    for factor in (0x369DEA0F31A53F85, 0x27BB2EE687B0B0FD):  # int64 products wrap around
        x = (x ^ (x >> 32)) * factor
    return (x ^ (x >> 29)).sum() & (_REFUSED - 1)


@dataclass(frozen=True)
class Part:
    """What a rank computes of a batch.

    Attributes:
        group: of ranks.
        tokens: the packed tokens that the rank holds.
        sent: int64, those among them whose states are scored, in order.
        sends, receives: the numbers of states that go to and come from each rank.
        targets: int64 [up to n], the ids that this rank scores.
        inverse: int64 [N], for each position of `Layout.score_index` its place among the results of all ranks.
    """

    group: SequenceGroup
    tokens: slice
    sent: Tensor
    sends: list[int]
    receives: list[int]
    targets: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, group: SequenceGroup, layout: Layout) -> Part:
        """The part of this rank. T must be a multiple of P."""
        ranks, rank, device = group.ranks, group.rank, layout.targets.device
        t, index = len(layout.token_index) // ranks, layout.score_index.cpu()
        n = -(-len(index) // ranks)
        order = index.argsort(stable=True)
        holder = index[order] // t
        scorer = torch.arange(len(index), device="cpu") // max(n, 1)
        counts = torch.bincount(holder * ranks + scorer, minlength=ranks**2).view(ranks, ranks)
        sent = index[order][holder == rank] - rank * t
        sent, own, inverse = (x.to(device) for x in (sent, order[scorer == rank], order.argsort()))
        numbers = counts[rank].tolist(), counts[:, rank].tolist()
        return cls(group, slice(rank * t, (rank + 1) * t), sent, *numbers, layout.targets[own], inverse)

    def inputs(self, layout: Layout, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the backbone for the tokens of this rank, of those for all."""
        own = {name: inputs[name][:, self.tokens] for name in ("input_ids", "position_ids")}
        return {**inputs, **own, "attention_mask": self.group.mask(layout)}

    def scored_states(self, states: Tensor) -> Tensor:
        """The states that this rank scores [up to n, D], of those of its tokens [t, D]."""
        return _Exchanged.apply(states.index_select(0, self.sent), self.sends, self.receives, self.group)

    def results(self, scored: TokenLogps) -> TokenLogps:
        """The results of all positions [N], of those that this rank has scored."""
        own = {name: x for name, x in scored._asdict().items() if x is not None}
        columns = torch.stack([x.to(scored.logps.dtype) for x in own.values()], 1)
        whole = _Gathered.apply(columns, len(self.inverse), self.group)[self.inverse]
        return TokenLogps(**{name: whole[:, i].to(x.dtype) for i, (name, x) in enumerate(own.items())})


class _Exchanged(torch.autograd.Function):
    """Rows of x from all ranks. The first `sends[0]` rows go to rank 0, and so on; None: equal numbers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sends: list[int] | None, receives: list[int] | None, group: SequenceGroup
    ) -> Tensor:
        ctx.reverse = receives, sends, group
        out = x.new_empty(len(x) if receives is None else sum(receives), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchanged.apply(grad, *ctx.reverse), None, None, None


class _Gathered(torch.autograd.Function):
    """The rows of all ranks [N, K]. Rank r has those from r n on.

    All ranks compute the same loss, so the backward takes a rank's own rows, without communication, times P: gradients
    of parameters are summed over the group by taking their mean.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, group: SequenceGroup) -> Tensor:
        n = -(-rows // group.ranks)
        ctx.own, ctx.ranks = slice(group.rank * n, group.rank * n + len(x)), group.ranks
        out = x.new_empty(group.ranks, n, x.shape[1])
        dist.all_gather([*out], F.pad(x, (0, 0, 0, n - len(x))), group=group.group)
        return out.flatten(0, 1)[:rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.own] * ctx.ranks, None, None


def _divisible(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key and value [1, heads, t, ..] whose heads the ranks divide, and the sinks of the query's heads.

    Key heads are repeated to a common multiple of H_kv and P. If P does not divide H, each query head gets its key
    head, and heads of zeros are added, which attend to zeros.
    """
    heads, of_keys = query.shape[1], key.shape[1]
    idle = -heads % ranks
    copies = heads // of_keys if idle else math.lcm(of_keys, ranks) // of_keys
    if copies > 1:
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    if idle:
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, idle)) for x in (query, key, value))
        sinks = None if sinks is None else F.pad(sinks, (0, idle))
    return query, key, value, sinks


def attend(
    forward: Callable[..., Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *args: Any,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The attention of a rank's tokens to all, [1, t, H, D_v].

    Args:
        forward: the attention of one process, [1, T, heads, D_v].
        module: the layer.
        query: [1, H, t, D].
        key: [1, H_kv, t, D].
        value: [1, H_kv, t, D_v].
        mask: `SequenceGroup.mask` of the layout of all tokens.
        *args, s_aux, **kwargs: further arguments of `forward`. Sinks `s_aux` are [H].
    """
    group, heads, t = _groups[mask.shape[1] - 2], query.shape[1], query.shape[2]
    query, key, value, sinks = _divisible(query, key, value, s_aux, group.ranks)
    by_rank = [x[0].unflatten(0, (group.ranks, -1)).transpose(1, 2) for x in (query, key, value)]
    shapes = [x.shape[2:] for x in by_rank]  # [P, t, h, D]
    joined = torch.cat([x.flatten(2) for x in by_rank], -1).flatten(0, 1)
    parts = _Exchanged.apply(joined, None, None, group).split([shape.numel() for shape in shapes], -1)
    own = [x.unflatten(-1, shape).transpose(0, 1)[None] for x, shape in zip(parts, shapes, strict=True)]  # [1, h, T, D]
    sinks = None if sinks is None else sinks.chunk(group.ranks)[group.rank]
    out = forward(module, *own, mask[:, :1], *args, s_aux=sinks, **kwargs)[0]  # [T, h, D_v]
    out = _Exchanged.apply(out.flatten(1), None, None, group).unflatten(0, (group.ranks, t))
    return out.unflatten(-1, (shapes[0][0], -1)).transpose(0, 1).flatten(1, 2)[None, :, :heads]
