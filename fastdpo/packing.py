"""Padded batches packed so that each distinct token is stored once, and the `Layout` that says how they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100
INTS = (torch.int32, torch.int64)
LARGEST_ID = 2**31 - 1  # products of ids and positions are int64


class NotPackable(ValueError):
    """A batch that can only be run as it is padded. The message is the reason."""


@dataclass(frozen=True)
class Layout:
    """How the rows of a padded batch `[R, L]` lie in a packed buffer of T tokens.

    The rows of a group are stored as their longest common prefix of token ids, once, followed by what each row has
    after it: `[P | C | R]` for a pair. Positions of C and of R both go on from P. Only tokens that a scored position
    depends on are stored. A scored position that several rows share with the same target is scored once.

    Attributes:
        token_index: int64 [T], where each packed token stands in the flattened padded batch.
        position_ids: int64 [T].
        rows: int32 [S, 4] on the CPU, for attention: (prefix start, prefix length, own start, own length). The own
            tokens of the rows tile [0, T) in order; they see their prefix and, causally, themselves. The first row of
            a group has the prefix among its own.
        score_index: int64 [N], the packed tokens whose next token is scored.
        targets: int64 [N], what they are scored against.
        output_index: int64 [M], the places of the flattened `[R, W]` output that hold a scored value.
        output_source: int64 [M], which of the N values each of them holds.
        padded_shape: (R, L).
        output_shape: (R, W), with W = L - 1 (L where the labels came shifted).
        multiplicity: int64 [T], how many of the rows each packed token stands for.
    """

    token_index: Tensor
    position_ids: Tensor
    rows: Tensor
    score_index: Tensor
    targets: Tensor
    output_index: Tensor
    output_source: Tensor
    padded_shape: tuple[int, int]
    output_shape: tuple[int, int]
    multiplicity: Tensor

    def pack(self, padded: Tensor) -> Tensor:
        """`[R, L]` values of tokens to `[1, T]`."""
        _require_shape("Layout.pack", "padded", padded, self.padded_shape)
        return padded.reshape(-1)[self.token_index][None]

    def unpack(self, scored: Tensor) -> Tensor:
        """`[N]` values of scored positions to `[R, W]`, zero elsewhere. Differentiable."""
        _require_shape("Layout.unpack", "scored", scored, self.score_index.shape)
        padded = scored.new_zeros(self.output_shape[0] * self.output_shape[1])
        return padded.index_copy(0, self.output_index, scored[self.output_source]).view(self.output_shape)

    @property
    def mask(self) -> Tensor:
        """int32 [1, 1, S, 4]: the rows in the form in which they reach attention, as a 4-D attention mask."""
        return self.rows[None, None]


def pack_pairs(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, *, share: bool = True) -> Layout:
    """The layout of a preference batch whose rows i and i + R/2 answer the same prompt. See `pack`."""
    if len(input_ids) % 2:
        raise ValueError(f"pack_pairs: input_ids must have an even number of rows; got {len(input_ids)}")
    pairs = torch.arange(len(input_ids), device="cpu") % (len(input_ids) // 2 or 1)
    return pack(input_ids, attention_mask, labels, groups=pairs if share else None)


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    *,
    groups: Tensor | None = None,
    shifted: bool = False,
    store_all: bool = False,
    reach: int | None = None,
) -> Layout:
    """The layout of a padded batch. Works on the host: one copy from the device, one back.

    What rows share is found by comparing token ids, never by trusting a prompt length.

    Args:
        input_ids: int32 or int64 [R, L], padded on either side.
        attention_mask: bool or int [R, L], nonzero where a token is real; or 0 and 1 in floating point. The real
            tokens of a row are contiguous.
        labels: int32 or int64 [R, L], -100 where nothing is scored. Label i is scored by position i - 1.
        groups: int32 or int64 [R]; rows of the same number may share a prefix. None: no two rows do.
        shifted: label i is scored by position i, and the output is as wide as the input.
        store_all: store every real token, even those that no scored position depends on (a router loss counts them).
        reach: positions go up to `reach - 1`, by a token that nothing attends to if need be: for rotary embeddings that
            depend on the largest position of the batch.

    Returns:
        The `Layout`, with its tensors on the device of `input_ids` (`rows` on the CPU).

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
        NotPackable: a mask has holes, a label is scored by a padding position, or no token is real.
    """
    for name, tensor in (("attention_mask", attention_mask), ("labels", labels)):
        if tensor.shape != input_ids.shape:
            raise ValueError(
                f"pack: {name} must have the shape of input_ids {list(input_ids.shape)}; got {list(tensor.shape)}"
            )
    if input_ids.dim() != 2:
        raise ValueError(f"pack: input_ids must be [R, L]; got {list(input_ids.shape)}")
    if groups is not None:
        _require_shape("pack", "groups", groups, input_ids.shape[:1])
    for name, tensor in (("input_ids", input_ids), ("labels", labels), ("groups", groups)):
        if tensor is not None and tensor.dtype not in INTS:
            raise TypeError(f"pack: {name} must be int32 or int64; got {tensor.dtype}")
    if attention_mask.dtype.is_complex:
        raise TypeError(f"pack: attention_mask must be bool, int or floating point; got {attention_mask.dtype}")
    if reach is not None and (not isinstance(reach, int) or isinstance(reach, bool)):
        raise TypeError(f"pack: reach must be an int or None; got {reach}")

    if 0 in input_ids.shape:
        raise NotPackable("no token is real")

    device = input_ids.device
    ids, real, targets = _to_host(input_ids, _real(attention_mask), labels if shifted else labels[:, 1:])
    if real.dtype != torch.bool and (real > 1).any():
        raise ValueError("pack: attention_mask must be bool or int, or 0 and 1 in floating point; got another value")
    real = real.bool()
    scored = targets != IGNORE_INDEX  # [R, W]
    target = targets[scored]  # [M]
    if (target < 0).any():
        raise ValueError(f"pack: labels must be {IGNORE_INDEX} or ids of tokens; got {int(target.min())}")
    if (target > LARGEST_ID).any():
        raise ValueError(f"pack: labels must be {IGNORE_INDEX} or ids of tokens, below 2**31; got {int(target.max())}")
    offset, need = _extents(real, scored, store_all)
    n_rows, length = ids.shape

    # Rows in groups, those without a needed token left out. The first of each group leads it.
    members = (groups.cpu() if groups is not None else torch.arange(n_rows, device="cpu"))[need > 0]
    order = members.argsort(stable=True)
    row = (need > 0).nonzero()[:, 0][order]  # [S] original row numbers
    group = torch.unique_consecutive(members[order], return_inverse=True)[1]
    leads = torch.ones_like(group, dtype=torch.bool)
    leads[1:] = group[1:] != group[:-1]
    leader = leads.nonzero()[:, 0][group]  # [S] index among the S rows
    prefix = _common_prefixes(ids, offset, need, row, leader, group)  # [S]

    own_length = need[row] - prefix * ~leads
    own_start = own_length.cumsum(0) - own_length
    skipped = prefix * ~leads  # positions of a row that stand in its prefix
    prefix_start, own_zero = own_start[leader], own_start - skipped  # where a row's position 0 lies, or would
    n_tokens = int(own_length.sum())
    position_ids = torch.arange(n_tokens, device="cpu") - _repeat(own_zero, own_length)  # [T]
    token_index = _repeat(row * length + offset[row], own_length) + position_ids
    rows = torch.stack([prefix_start, skipped, own_start, own_length], 1)[own_length > 0]
    multiplicity = _multiplicity(prefix_start, skipped, n_tokens)
    if reach is not None and position_ids.max() < reach - 1:
        rows = torch.cat([rows, rows.new_tensor([[n_tokens, 0, n_tokens, 1]])])
        token_index = torch.cat([token_index, token_index[:1]])
        position_ids = torch.cat([position_ids, position_ids.new_tensor([reach - 1])])
        multiplicity = torch.cat([multiplicity, multiplicity.new_zeros(1)])

    # Every scored (row, column) and the packed position that scores it.
    output_index = torch.from_numpy(np.flatnonzero(scored.numpy()))  # [M]
    index_of_row = row.new_zeros(n_rows).index_copy_(0, row, torch.arange(len(row), device="cpu"))
    per_row = row * scored.shape[1] + offset[row], prefix, prefix_start, own_zero
    first, shared, shared_zero, zero = (_repeat(x[index_of_row], scored.sum(1)) for x in per_row)  # [M] each
    position = output_index - first
    in_prefix = position < shared
    packed = position + torch.where(in_prefix, shared_zero, zero)
    score_index, score_targets, output_source = _score_once(packed, target, in_prefix)

    tensors = (token_index, position_ids, score_index, score_targets, output_index, output_source, multiplicity)
    tensors = _to_device(device, *tensors)
    token_index, position_ids, score_index, score_targets, output_index, output_source, multiplicity = tensors
    return Layout(
        token_index,
        position_ids,
        rows.int(),
        score_index,
        score_targets,
        output_index,
        output_source,
        (n_rows, length),
        (n_rows, scored.shape[1]),
        multiplicity,
    )


def padded(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, shifted: bool = False) -> Layout:
    """The layout of a batch that is run as it is padded: each position stands for itself, padding for no token.

    Arguments are those of `pack`.
    """
    device, (n_rows, length) = input_ids.device, input_ids.shape
    targets = labels if shifted else labels[:, 1:]
    output_index = (targets != IGNORE_INDEX).flatten().nonzero()[:, 0]
    row, column = output_index // targets.shape[1], output_index % targets.shape[1]
    starts = torch.arange(n_rows, dtype=torch.int32, device="cpu") * length
    zeros = torch.zeros_like(starts)
    return Layout(
        token_index=torch.arange(n_rows * length, device=device),
        position_ids=torch.arange(length, device=device).repeat(n_rows),
        rows=torch.stack([starts, zeros, starts, zeros + length], 1),
        score_index=row * length + column,
        targets=targets.flatten()[output_index].long(),
        output_index=output_index,
        output_source=torch.arange(len(output_index), device=device),
        output_shape=(n_rows, targets.shape[1]),
        multiplicity=(attention_mask != 0).flatten().long(),
        padded_shape=(n_rows, length),
    )


def _require_shape(op: str, argument: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{op}: {argument} must be {list(shape)}; got {list(tensor.shape)}")


def _real(attention_mask: Tensor) -> Tensor:
    """Nonzero where tokens are real; 2 where a mask in floating point is neither 0 nor 1 (NaN, or added to scores)."""
    real = attention_mask != 0
    return real.byte() + (real & (attention_mask != 1)) if attention_mask.dtype.is_floating_point else real


def _extents(real: Tensor, scored: Tensor, store_all: bool) -> tuple[Tensor, Tensor]:
    """Where the tokens of each row begin, and how many of them scored positions depend on; both [R]."""
    lengths = real.sum(1)
    offset, end = _span(real)
    if ((end - offset != lengths) & (lengths > 0)).any():
        raise NotPackable("an attention mask has holes")
    first, last = _span(scored)
    any_scored = scored.any(1)
    if (any_scored & ((first < offset) | (last > offset + lengths))).any():
        raise NotPackable("a label is scored by a padding position")
    if not lengths.any():
        raise NotPackable("no token is real")
    need = lengths if store_all else torch.where(any_scored, last - offset, 0)
    if not need.any():  # one token, so that a batch without any label still has a differentiable zero
        need = need.index_fill(0, lengths.argmax(), 1)
    return offset, need


def _span(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The first column of each row where the mask is set, and the one after the last; the whole row if none is."""
    if not mask.shape[1]:
        nowhere = mask.new_zeros(len(mask), dtype=torch.long)
        return nowhere, nowhere
    columns = mask.numpy()  # its argmax of booleans stops at the first
    return torch.from_numpy(columns.argmax(1)), torch.from_numpy(columns.shape[1] - columns[:, ::-1].argmax(1))


def _common_prefixes(ids: Tensor, offset: Tensor, need: Tensor, row: Tensor, leader: Tensor, group: Tensor) -> Tensor:
    """How many tokens all rows of a row's group have in common; 0 for a group of one. [S]"""
    follows = (leader != torch.arange(len(leader), device="cpu")).nonzero()[:, 0]
    if not len(follows):
        return torch.zeros_like(leader)
    mine, first = row[follows], row[leader[follows]]
    bound = torch.minimum(need[mine], need[first])
    columns = torch.arange(int(bound.max()), device="cpu")
    same = _from(ids[mine], offset[mine], columns) == _from(ids[first], offset[first], columns)
    same &= columns < bound[:, None]
    common = torch.where(same.all(1), bound, _span(~same)[0])
    shortest = torch.full_like(leader, ids.shape[1]).scatter_reduce(0, group[follows], common, "amin")  # [groups..]
    has_followers = torch.zeros_like(leader, dtype=torch.bool).index_fill(0, group[follows], True)
    return torch.where(has_followers, shortest, 0)[group]


def _repeat(values: Tensor, counts: Tensor) -> Tensor:
    """Each value as often as its count says: what `repeat_interleave` does, some ten times as fast."""
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def _from(ids: Tensor, offset: Tensor, columns: Tensor) -> Tensor:
    """The tokens of each row that begin at its offset; beyond the row's end, any."""
    if not offset.any():
        return ids[:, : len(columns)]
    return ids.gather(1, (offset[:, None] + columns).clamp(max=ids.shape[1] - 1))


def _multiplicity(prefix_start: Tensor, prefix_length: Tensor, n_tokens: int) -> Tensor:
    """1 and the number of prefixes that each token stands in. [T]"""
    change = prefix_start.new_zeros(n_tokens + 1)
    change[0] = 1
    change.index_add_(0, prefix_start, torch.ones_like(prefix_start))
    change.index_add_(0, prefix_start + prefix_length, torch.ones_like(prefix_start), alpha=-1)
    return change.cumsum(0)[:-1]


def _score_once(packed: Tensor, target: Tensor, in_prefix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merges equal (position, target); only in a prefix can there be any. Returns index, targets [N], source [M]."""
    base = int(target.max()) + 1 if len(target) else 1
    key, merged = torch.unique((packed * base + target)[in_prefix], return_inverse=True)
    alone = ~in_prefix
    source = alone.cumsum(0) - 1
    source[in_prefix] = int(alone.sum()) + merged
    return torch.cat([packed[alone], key // base]), torch.cat([target[alone], key % base]), source


def _to_host(ids: Tensor, real: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if ids.device.type == "cpu":
        return ids.long(), real, targets.long()
    sizes = [ids.numel(), real.numel(), targets.numel()]
    flat = torch.cat([x.reshape(-1).long() for x in (ids, real, targets)]).cpu().split(sizes)
    return flat[0].view(ids.shape), flat[1].view(real.shape), flat[2].view(targets.shape)


def _to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    if device.type == "cpu":
        return tensors
    flat = torch.cat(tensors)
    flat = flat.pin_memory() if device.type == "cuda" else flat
    return flat.to(device, non_blocking=True).split([len(t) for t in tensors])
