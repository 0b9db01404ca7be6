"""The rows of a layout in the forms that GPU kernels take, computed on the host, whatever the default device.

Dimensions: T packed tokens, S rows of the layout, M gathered keys.
"""

from __future__ import annotations

import math
from bisect import bisect
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import checks
from .calls import OP
from .layout_cache import to_device

if TYPE_CHECKING:
    from ...kernels.attention_blocks import KernelConfig, KernelConfigs, LayoutBlocks

MOST_PARTS = 512
"""Programs of a launch whose sums are parts of those of a block of keys.

A block has several programs if each can have this share of all work, so that none does much more than twice as much,
which is the mean on GPUs: they run 200 to 300 programs at a time. The buffers of all parts take at most 32 MiB, or 64
with heads above 128.
"""
LEAST_TURNS = 64
"""Blocks of queries of one head in such a program. They take much longer than to store its sums and to add them."""


class KeyPlaces(NamedTuple):
    """Where keys are gathered so that those of each row are contiguous. int32, on the device."""

    index: Tensor  # [M] the token whose key is copied to each place
    readers: Tensor  # [M] the places that hold each token's key, sorted by token
    first_reader: Tensor  # [T + 1] where the places of each token start in `readers`


class VarlenLayout(NamedTuple):
    """The rows as sequences of variable length, each with the keys of its prefix before its own.

    On the device.

    Attributes:
        cu_queries: int32 [S + 1], offsets of each row's queries.
        cu_keys: int32 [S + 1], offsets of each row's keys.
        max_queries: the most queries of a row.
        max_keys: the most keys of a row.
        places: None if no row has a prefix, so that no key has to be copied.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    places: KeyPlaces | None

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Offsets and maximum lengths, in the order in which the libraries take them."""
        return self.cu_queries, self.cu_keys, self.max_queries, self.max_keys


class Piece(NamedTuple):
    """Contiguous packed tokens that are a part of a row.

    Attributes:
        start: the first of them.
        length: their number.
        position: of the first one in the row.
    """

    start: int
    length: int
    position: int


class Row(NamedTuple):
    """A row of a layout.

    Attributes:
        prefix: its prefix in as few pieces as possible, in order.
        prefix_length: their tokens.
        own: the first of its own tokens.
        own_length: their number.
    """

    prefix: list[Piece]
    prefix_length: int
    own: int
    own_length: int

    @property
    def pieces(self) -> list[Piece]:
        """All tokens of the row."""
        return self.until(self.prefix_length + self.own_length)

    def until(self, length: int) -> list[Piece]:
        """The first `length` tokens of the row, which are more than its prefix."""
        own = Piece(self.own, length - self.prefix_length, self.prefix_length)
        if not self.prefix or sum(self.prefix[-1][:2]) != self.own:
            return [*self.prefix, own]
        *before, (start, last_length, position) = self.prefix
        return [*before, Piece(start, last_length + own.length, position)]


def checked_rows(rows: Tensor, tokens: int) -> list[Row]:
    """The rows [S, 4], with the pieces of their prefixes.

    Raises:
        ValueError: the rows do not tile [0, tokens), so kernels would read or leave unwritten
            memory outside of them, or a prefix is not the beginning of a row before.
    """
    end, checked, starts = 0, [], []
    for row in map(tuple, rows.tolist()):
        prefix, length, own, own_length = row
        fits = own == end and own_length > 0 and prefix >= 0 and length >= 0 and prefix + length <= own
        checks.require(fits, OP, "rows", "tile [0, {}) in order, each after its prefix", row, tokens)
        pieces = []
        if length:
            parent = checked[bisect(starts, prefix + length - 1) - 1]
            begins = prefix == parent.own - parent.prefix_length
            checks.require(begins, OP, "rows", "have prefixes that other rows begin with", row)
            pieces = parent.until(length)
        checked.append(Row(pieces, length, own, own_length))
        starts.append(own)
        end = own + own_length
    checks.require(end == tokens, OP, "rows", "tile [0, {})", f"[0, {end})", tokens)
    return checked


def layout_blocks(
    query: Tensor,
    value: Tensor,
    rows: Tensor,
    window: int | None,
    configs: KernelConfigs,
    least_turns: int = LEAST_TURNS,
) -> LayoutBlocks:
    """The rows in blocks of queries and of keys, for fastdpo's kernels.

    Args:
        query: [T, H, D], of which only the shape and the device are read.
        value: [T, H_kv, D_v], the same.
        rows: [S, 4].
        window: of the call, or None.
        configs: the sizes of blocks.
        least_turns: instead of `LEAST_TURNS`.
    """
    from ...kernels.attention_blocks import LayoutBlocks, PartialSums

    checked, device = checked_rows(rows, len(query)), query.device
    pieces = [(i, *piece) for i, row in enumerate(checked) for piece in row.pieces]
    pieces, rows = torch.tensor(pieces, dtype=torch.long, device="cpu").view(-1, 4), rows.long()
    first_piece = _offsets(pieces[:, 0].bincount(minlength=len(rows)))
    queries = (_blocks_of_queries(rows, x.block_q) for x in (configs.forward, configs.query_gradient))
    blocks = _blocks_of_rows(rows[:, 3], configs.key_gradient.block_k)
    readers, work = _readers(rows, pieces, blocks, window, configs.key_gradient)
    heads, key_heads = query.shape[1], value.shape[1]
    share = math.ceil(int(work[:, 2].sum()) * key_heads / MOST_PARTS)
    least = max(share, least_turns * key_heads // heads, 1)
    keys, token_of_place = _programs_of_keys(rows, blocks, work, configs.key_gradient.block_k, least)
    parts = None
    if len(token_of_place):
        places = token_of_place.argsort(stable=True)
        tokens, counts = token_of_place[places].unique_consecutive(return_counts=True)
        parts = PartialSums(*(to_device(x, device) for x in (places, _offsets(counts), tokens)))
    tensors = (rows, pieces, first_piece, *queries, keys, readers)
    return LayoutBlocks(*(to_device(x, device) for x in tensors), parts=parts)


def _blocks_of_queries(rows: Tensor, size: int) -> Tensor:
    """[number of blocks, 2] row and first token, those that see the most keys first."""
    _, prefix_length, _, own_length = rows.unbind(1)
    row, first = _blocks_of_rows(own_length, size)
    keys_seen = prefix_length[row] + torch.minimum(first + size, own_length[row])
    return torch.stack([row, first], 1)[keys_seen.argsort(descending=True, stable=True)]


def _readers(
    rows: Tensor, pieces: Tensor, blocks: tuple[Tensor, Tensor], window: int | None, config: KernelConfig
) -> tuple[Tensor, Tensor]:
    """`LayoutBlocks.readers`, and who reads each of the blocks of keys.

    The latter is [E, 3]: a block, one of the readers of its row that have queries that see some of its keys, and the
    number of blocks of such queries. It is sorted.
    """
    _, prefix_length, own, own_length = rows.unbind(1)
    reading, start, length, position = pieces.unbind(1)
    overlap = (start < (own + own_length)[:, None]) & (start + length > own[:, None])  # [row, piece]
    readers, counts = overlap.nonzero()[:, 1], overlap.sum(1)
    row, first = blocks
    block, nth = _blocks_of_rows(counts[row], 1)
    reader = _offsets(counts)[row[block]] + nth
    piece = readers[reader]
    skipped = (own[row] + first)[block] - start[piece]  # keys of the piece before those of the block
    begin = position[piece] + skipped - prefix_length[reading[piece]]
    end = own_length[reading[piece]]
    if window is not None:
        end = torch.minimum(end, begin + config.block_k - 1 + window)
    queries = (end - begin.clamp(min=0)) * (skipped < length[piece])
    turns = (queries + config.block_q - 1) // config.block_q
    return readers, torch.stack([block, reader, turns], 1)[queries > 0]


def _programs_of_keys(
    rows: Tensor, blocks: tuple[Tensor, Tensor], work: Tensor, size: int, least: int
) -> tuple[Tensor, Tensor]:
    """`LayoutBlocks.keys`, and the token of each place of a part.

    A block of `size` keys has as many programs as can have `least` turns each, with whole readers. These are short
    enough: a row of m blocks of queries reads its own keys in m^2 / 2 turns, so it has more turns than the mean of 256
    programs only if m < 512 / H_kv and the batch has little else.
    """
    _, _, own, own_length = rows.unbind(1)
    row, first = blocks
    block, reader, turns = work.unbind(1)
    done = _offsets(turns)
    of_block = torch.zeros_like(row).index_add_(0, block, turns)
    programs = (of_block // least).clamp(min=1)
    middle = done[:-1] + turns // 2 - _offsets(of_block)[block]  # of a reader in the turns of its block
    program = _offsets(programs)[block] + middle * programs[block] // of_block[block]
    _, counts = program.unique_consecutive(return_counts=True)
    ends = _offsets(counts)
    block, first_reader, last_reader = block[ends[:-1]], reader[ends[:-1]], reader[ends[1:] - 1]
    row, first = row[block], first[block]

    is_part = block.bincount()[block] > 1
    places = (own_length[row] - first).clamp(max=size) * is_part
    first_place = torch.where(is_part, _offsets(places)[:-1], -1)
    found = torch.stack([row, first, first_reader, last_reader + 1, first_place], 1)
    program, key = _blocks_of_rows(places, 1)
    return found[done[ends].diff().argsort(descending=True, stable=True)], (own[row] + first)[program] + key


def _blocks_of_rows(lengths: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The row of each block of `size` tokens, and the block's first token within the row."""
    counts = (lengths + size - 1) // size
    row = torch.arange(len(lengths), device="cpu").repeat_interleave(counts)
    return row, (torch.arange(len(row), device="cpu") - _offsets(counts)[row]) * size


def _offsets(lengths: Tensor) -> Tensor:
    """[n + 1] start of each of n contiguous pieces, and the end of the last."""
    return torch.cat([torch.zeros(1, dtype=torch.long, device="cpu"), lengths.cumsum(0)])


def varlen_layout(rows: Tensor, tokens: int, device: torch.device) -> VarlenLayout:
    """The rows as sequences of variable length, for libraries of flash attention."""
    checked = checked_rows(rows, tokens)
    own_length, lengths = rows[:, 3].long(), rows[:, 1].long() + rows[:, 3]
    cu_queries, cu_keys = _offsets(own_length), _offsets(lengths)
    max_queries, max_keys = (int(x.max()) if len(x) else 0 for x in (own_length, lengths))
    places = None
    if rows[:, 1].any():
        pieces = [piece for row in checked for piece in row.pieces]
        index = torch.cat([torch.arange(start, start + length, device="cpu") for start, length, _ in pieces])
        first_reader = _offsets(index.bincount(minlength=tokens))
        tensors = (index, index.argsort(stable=True), first_reader)
        places = KeyPlaces(*(to_device(x, device) for x in tensors))
    cu_queries, cu_keys = (to_device(x, device) for x in (cu_queries, cu_keys))
    return VarlenLayout(cu_queries, cu_keys, max_queries, max_keys, places)
