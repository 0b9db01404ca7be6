"""Packs padded batches so that tokens that rows share are stored once.

Dimensions: R rows of a padded batch, L their length, T packed tokens, S rows of the layout, N
scored positions, M scored labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from . import checks, row_forms
from .prefix_tree import Branch, prefix_tree
from .reasons import Reason
from .row_forms import IGNORE_INDEX

ON_HOST = ("rows", "label_bounds")  # the tensors of a layout that stay on the CPU

Ints = NDArray[np.int64]


class NotPackable(ValueError):
    """The batch has no packed form and must be run padded.

    Attributes:
        reason: why.
    """

    def __init__(self, reason: Reason):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Layout:
    """How the rows of a padded batch [R, L] are stored in a packed buffer of T tokens.

    Token ids that rows begin with are stored once, followed by the remaining tokens of each row:
    `[P | C | R]` for a pair. The positions of C and of R both continue those of P. Rows form a tree
    (`prefix_tree`): of four rows, two may share a prompt, and all the system prompt before it. Only
    tokens that a scored position depends on are stored. A position that several rows share with the
    same target is scored once.

    Attributes:
        token_index: int64 [T], the index of each packed token in the flattened padded batch.
        position_ids: int64 [T], the position of each packed token in its row.
        rows: int32 [S, 4] on the CPU, for attention: (prefix start, prefix length, own start, own
            length). The own tokens of the rows tile [0, T) in order. They see their prefix and,
            causally, themselves. The prefix is the packed token `prefix start + prefix length - 1`,
            which belongs to a row before, and what that token sees. It begins at `prefix start` if
            that row has no prefix itself.
        score_index: int64 [N], the packed tokens whose next token is scored.
        targets: int64 [N], the ids that are scored.
        output_index: int64 [M], the indices in the flattened [R, W] output that hold a scored
            value.
        output_source: int64 [M], which of the N values each of them holds.
        padded_shape: (R, L).
        output_shape: (R, W), with W = L - 1, or W = L for shifted labels.
        multiplicity: int64 [T], the number of rows that contain each packed token.
        label_bounds: int64 [R + 1] on the CPU, the start of each row's labels among all M, and M.
        unshared: the number of tokens that would be stored if rows shared none.
        id_range: the smallest and the largest id of the whole padded batch; None if the batch is run padded.
        is_left_padded: whether padding comes before a stored token.
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
    label_bounds: Tensor
    unshared: int
    id_range: tuple[int, int] | None = None
    is_left_padded: bool = False

    @property
    def label_index(self) -> Tensor:
        """int64 [M], the packed token that predicts each label, row by row."""
        return self.score_index[self.output_source]

    @property
    def labels(self) -> Tensor:
        """int64 [M], the labels that are scored, row by row."""
        return self.targets[self.output_source]

    def pack(self, padded: Tensor) -> Tensor:
        """Packs values per token [R, L], such as ids, to [1, T].

        Raises:
            ValueError: the shape is not [R, L].
        """
        checks.require_tensors("Layout.pack", padded=padded)
        checks.require_values("Layout.pack", padded=padded)
        checks.require_shape("Layout.pack", "padded", padded, self.padded_shape)
        return padded.reshape(-1)[self.token_index][None]

    def unpack(self, scored: Tensor) -> Tensor:
        """Expands values of labels [M], in the order of `label_index`, to [R, W], zero elsewhere. Differentiable.

        Values of the N positions of `score_index` are expanded as well. Where N equals M, both orders are the same.

        Raises:
            ValueError: the shape is neither [M] nor [N].
        """
        checks.require_tensors("Layout.unpack", scored=scored)
        if scored.shape != self.output_index.shape:
            checks.require_shape("Layout.unpack", "scored", scored, self.score_index.shape)
            scored = scored.index_select(0, self.output_source)
        checks.require_same_device("Layout.unpack", output_index=self.output_index, scored=scored)
        padded = scored.new_zeros(self.output_shape[0] * self.output_shape[1])
        padded.index_copy_(0, self.output_index, scored)
        return padded.view(self.output_shape)

    def to(self, device: torch.device) -> Layout:
        """A layout whose tensors are on the CPU with those on the device that are not read on the host.

        In at most one copy, without a synchronization.
        """
        if device.type == "cpu":
            return self
        of_device = {name: x for name, x in vars(self).items() if isinstance(x, Tensor) and name not in ON_HOST}
        flat = torch.cat([*of_device.values()])
        flat = flat.pin_memory() if device.type == "cuda" else flat
        parts = flat.to(device, non_blocking=True).split([len(x) for x in of_device.values()])
        return replace(self, **dict(zip(of_device, parts, strict=True)))

    @property
    def mask(self) -> Tensor:
        """The rows as int32 [1, 1, S, 4], the attention mask that carries them through a model."""
        return self.rows[None, None]


Groups = Literal["content", "pairs"]
"""Which rows of a batch may share the tokens that they begin with: rows that begin alike, or rows i and i + R/2."""


class Form(NamedTuple):
    """How a layout is made of a batch. `pack` has arguments of these names."""

    groups: Tensor | Groups | None
    store_all: bool = False
    reach: int | None = None
    tokens: int | Callable[[int], int] | None = None
    count_padding: bool = False


def is_layout(mask: object) -> bool:
    """Whether an attention mask is that of a `Layout`."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[-1] == 4


def require_batch(op: str, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> None:
    """Requires the shapes and dtypes of `pack`."""
    tensors = dict(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
    checks.require_tensors(op, **tensors)
    checks.require_no_dtensor(op, **tensors)
    checks.require_values(op, **tensors)
    shape = list(input_ids.shape)
    for name, tensor in tensors.items():
        of_ids = tensor.shape == input_ids.shape
        checks.require(of_ids, op, name, "have the shape of input_ids {}", list(tensor.shape), shape)
    checks.require(len(shape) == 2, op, "input_ids", "be [R, L]", shape)
    checks.require_ints(op, input_ids=input_ids, labels=labels)
    checks.require_real(op, attention_mask=attention_mask)
    checks.require_same_device(op, **tensors)


def pack_pairs(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, *, share: bool = True) -> Layout:
    """The layout of a preference batch whose rows i and i + R/2 are completions of the same prompt.

    Args:
        input_ids, attention_mask, labels: as in `pack`, with an even number of rows.
        share: store the common prefix of a pair once.

    Returns:
        The `Layout`.

    Raises:
        ValueError: the number of rows is odd, or as in `pack`.
        TypeError, NotPackable: as in `pack`.
    """
    require_batch("pack_pairs", input_ids, attention_mask, labels)
    checks.require_flags("pack_pairs", share=share)
    if len(input_ids) % 2:
        raise ValueError(f"pack_pairs: input_ids must have an even number of rows; got {len(input_ids)}")
    return make_layout(input_ids, attention_mask, labels, Form("pairs" if share else None), shifted=False)


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    *,
    groups: Tensor | Groups | None = None,
    shifted: bool = False,
    store_all: bool = False,
    reach: int | None = None,
    tokens: int | Callable[[int], int] | None = None,
    count_padding: bool = False,
) -> Layout:
    """The layout of a padded batch.

    Computed on the host, with one copy from the device and one back. Shared prefixes are found by
    comparing token ids, not from a prompt length.

    Args:
        input_ids: int32 or int64 [R, L], padded on either side.
        attention_mask: bool or int [R, L], nonzero where a token is real; or floating point with
            values 0 and 1. The real tokens of a row must be contiguous.
        labels: int32 or int64 [R, L], -100 where nothing is scored. Position i - 1 scores label i.
        groups: int32 or int64 [R]. Rows with the same number may share a prefix. "content": all rows, in
            any order. "pairs": rows i and i + R/2, as in `pack_pairs`. None: no rows do.
        shifted: position i scores label i, and the output has the width of the input.
        store_all: store every real token, including those that no scored position depends on. A
            router's auxiliary loss counts them.
        reach: extend the positions to `reach - 1`, if necessary with a token that nothing attends
            to. For rotary embeddings that depend on the largest position of the batch.
        tokens: T, or a function that returns it for the least possible one, the tokens that are stored otherwise.
            The others are further rows without labels, none of them longer than the longest row.
        count_padding: count positions from the first column of the padded batch, for a model whose own positions do.
            Rows then share tokens in the same columns only.

    Returns:
        The `Layout`, with its tensors on the device of `input_ids` (`rows` on the CPU).

    Raises:
        ValueError: a shape or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
        NotPackable: an attention mask has holes, a label is scored by a padding position, or no
            token is real.
    """
    require_batch("pack", input_ids, attention_mask, labels)
    row_forms.require_form("pack", groups, reach, tokens, n_rows=len(input_ids))
    checks.require_flags("pack", shifted=shifted, store_all=store_all, count_padding=count_padding)
    form = Form(groups, store_all, reach, tokens, count_padding)
    return make_layout(input_ids, attention_mask, labels, form, shifted)


def make_layout(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, form: Form, shifted: bool) -> Layout:
    """`pack` of tensors and options whose form was checked. What the tensors hold is checked here."""
    if 0 in input_ids.shape:
        raise NotPackable(Reason("no-tokens"))
    device = input_ids.device
    on_host = to_host(input_ids, _real_tokens(attention_mask), labels if shifted else labels[:, 1:])
    ids, real, targets = (x.numpy() for x in on_host)
    scored = targets != IGNORE_INDEX  # [R, W]
    target = targets[scored]  # [M]
    row_forms.require_host_values("pack", real, target)
    row_forms.require_ids("pack", ids, targets, scored, shifted)

    # The tokens of each row that are stored, and the rows before it that hold the first of them.
    offset, need = _extents(real != 0, scored, form.store_all)
    n_rows, length = ids.shape
    row = np.flatnonzero(need)  # [S] rows of the padded batch
    stored = [ids[i, offset[i] : offset[i] + need[i]] for i in row]
    first_of: dict[object, int] = {}
    groups = _groups_of_rows(form.groups, ids, offset, scored)
    members = zip(groups, (offset * form.count_padding).tolist(), strict=True)
    first_rows = [first_of.setdefault(member, i) for i, member in enumerate(members)]  # of their groups
    group_of = [first_rows[i] for i in row]
    tree = prefix_tree(stored, group_of)
    order = sorted(range(len(row)), key=lambda i: (group_of[i], tree[i].root))  # rows that share are neighbours
    paths = _paths(stored, tree, order)  # [S, longest]

    # The packed tokens, and what attention sees of them.
    row, shared = row[order], np.array([tree[i].shared for i in order])
    own_length = need[row] - shared
    own_start = own_length.cumsum() - own_length
    last = paths[order, shared - 1]
    position_ids = np.arange(own_length.sum()) - np.repeat(own_start - shared, own_length)  # [T]
    token_index = np.repeat(row * length + offset[row], own_length) + position_ids
    position_ids = token_index % length if form.count_padding else position_ids
    prefix = np.where(shared > 0, last - shared + 1, own_start)
    rows = np.stack([prefix, shared, own_start, own_length], 1)[own_length > 0]
    multiplicity = np.bincount(paths[paths >= 0])

    # Every scored (row, column) of the output, and the packed position that scores it.
    output_index, counts = np.flatnonzero(scored), scored.sum(1)  # [M], [R]
    place = np.zeros(n_rows, dtype=np.int64)  # of each row in `paths`
    place[row] = order
    first = np.arange(n_rows) * scored.shape[1] + offset
    packed = paths[np.repeat(place, counts), output_index - np.repeat(first, counts)]
    score_index, score_targets, output_source = _score_once(packed, target, multiplicity[packed] > 1)

    packed_tokens = token_index, position_ids, rows, multiplicity
    token_index, position_ids, rows, multiplicity = _filled(packed_tokens, form, need.max())
    arrays = token_index, position_ids, rows.astype(np.int32), score_index, score_targets, output_index, output_source
    layout = Layout(
        *map(torch.from_numpy, arrays),
        padded_shape=(n_rows, length),
        output_shape=(n_rows, scored.shape[1]),
        multiplicity=torch.from_numpy(multiplicity),
        label_bounds=torch.from_numpy(np.append(0, counts.cumsum())),
        unshared=int(need.sum()),
        id_range=(int(ids.min()), int(ids.max())),
        is_left_padded=bool(offset[row].any()),
    )
    return layout.to(device)


def padded_layout(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, shifted: bool = False) -> Layout:
    """The layout of a batch that is run padded: nothing is shared, and padding has multiplicity 0.

    The arguments are those of `pack`. All tensors but `rows` stay on the device of `input_ids`.
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
        label_bounds=F.pad((targets != IGNORE_INDEX).sum(1).cpu().cumsum(0), (1, 0)),
        unshared=n_rows * length,
    )


def to_host(ids: Tensor, real: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors on the CPU, in at most one copy from the device."""
    if ids.device.type == "cpu":
        return ids.long(), real, targets.long()
    sizes = [ids.numel(), real.numel(), targets.numel()]
    flat = torch.cat([x.reshape(-1).long() for x in (ids, real, targets)]).cpu().split(sizes)
    return flat[0].view(ids.shape), flat[1].view(real.shape), flat[2].view(targets.shape)


def _real_tokens(attention_mask: Tensor) -> Tensor:
    """1 where tokens are real; 2 where a floating-point mask has a value other than 0 and 1.

    Such a value is NaN, or belongs to a mask that is added to scores.
    """
    real = attention_mask != 0
    return real.byte() + (real & (attention_mask != 1)) if attention_mask.dtype.is_floating_point else real


def _extents(real: NDArray[np.bool_], scored: NDArray[np.bool_], store_all: bool) -> tuple[Ints, Ints]:
    """The first real column of each row [R], and how many tokens its scored positions need [R]."""
    lengths = real.sum(1)
    offset, end = _span(real)
    if ((end - offset != lengths) & (lengths > 0)).any():
        raise NotPackable(Reason("mask-holes"))
    first, last = _span(scored)
    any_scored = scored.any(1)
    if (any_scored & ((first < offset) | (last > offset + lengths))).any():
        raise NotPackable(Reason("label-at-padding"))
    if not lengths.any():
        raise NotPackable(Reason("no-tokens"))
    need = lengths if store_all else np.where(any_scored, last - offset, 0)
    if not need.any():  # keep one token, so that a batch without labels has a differentiable zero
        need[lengths.argmax()] = 1
    return offset, need


def _span(mask: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The first column of each row where the mask is set, and the column after the last.

    The whole row if the mask is not set anywhere.
    """
    if not mask.shape[1]:
        zeros = np.zeros(len(mask), dtype=np.int64)
        return zeros, zeros
    return mask.argmax(1), mask.shape[1] - mask[:, ::-1].argmax(1)  # which stops at the first


def _groups_of_rows(
    groups: Tensor | str | None, ids: Ints, offset: Ints, scored: NDArray[np.bool_]
) -> Sequence[object]:
    """[R] what is equal for rows that may share a prefix. The arguments are those of `pack` and `_extents`."""
    if isinstance(groups, Tensor):
        return groups.tolist()
    if groups == "pairs":
        ends = _span(scored)[0] + 1  # prompts end after the token that scores the first label
        return row_forms.pairs_of([ids[i, offset[i] : ends[i]].tobytes() for i in range(len(ids))])
    return range(len(ids)) if groups is None else [0] * len(ids)


def _paths(rows: Sequence[Ints], tree: Sequence[Branch], order: Sequence[int]) -> Ints:
    """[S, longest] the packed token of each token of the rows, -1 behind their ends.

    Args:
        rows: the tokens of each row.
        tree: how each row is stored.
        order: the order in which the rows are.
    """
    paths = np.full((len(rows), max(map(len, rows))), -1)
    end = 0
    for i in order:
        parent, shared, _ = tree[i]
        own = len(rows[i]) - shared
        paths[i, :shared] = paths[parent, :shared]
        paths[i, shared : shared + own] = np.arange(end, end + own)
        end += own
    return paths


def _score_once(packed: Ints, target: Ints, shared: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """Merges equal pairs of packed position and target, which exist only where rows share the position.

    Returns:
        score_index [N], targets [N] and output_source [M] of the `Layout`.
    """
    base = target.max() + 1 if len(target) else 1
    key, merged = np.unique((packed * base + target)[shared], return_inverse=True)
    if len(key) == len(merged):  # nothing is merged
        return packed, target, np.arange(len(packed))
    unshared = ~shared
    source = unshared.cumsum() - 1
    source[shared] = unshared.sum() + merged
    return np.append(packed[unshared], key // base), np.append(target[unshared], key % base), source


def _filled(packed: tuple[Ints, Ints, Ints, Ints], form: Form, longest: int) -> tuple[Ints, Ints, Ints, Ints]:
    """token_index [T], position_ids [T], rows [S, 4] and multiplicity [T] of a layout, with further tokens in rows of
    their own of up to `longest` tokens.
    """
    token_index, position_ids, rows, multiplicity = packed
    reach, tokens = form.reach or 0, form.tokens
    n_tokens, is_short = len(token_index), position_ids.max() < reach - 1
    least = int(n_tokens + is_short)
    size = tokens(least) if callable(tokens) else least if tokens is None else tokens
    checks.require(size >= least, "pack", "tokens", "be at least {} for this batch", size, least)
    idle = size - n_tokens
    if not idle:
        return packed
    starts = np.arange(0, idle, longest) + n_tokens
    lengths = np.diff(starts, append=size)
    rows = np.append(rows, np.stack([starts, np.zeros_like(starts), starts, lengths], 1), 0)
    token_index = np.append(token_index, np.resize(token_index, idle))
    position_ids = np.append(position_ids, np.arange(idle) % longest)
    if is_short:
        position_ids[-1] = reach - 1
    return token_index, position_ids, rows, np.append(multiplicity, np.zeros(idle, dtype=np.int64))
