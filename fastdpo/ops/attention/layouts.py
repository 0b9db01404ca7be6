"""The rows of a layout in the forms that GPU kernels take, computed on the host.

Dimensions: T packed tokens, S rows of the layout, M gathered keys.
"""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import checks
from .calls import OP
from .layout_cache import to_device

if TYPE_CHECKING:
    from ...kernels.attention_blocks import LayoutBlocks


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


def layout_blocks(rows: Tensor, tokens: int, query_block: int, key_block: int, device: torch.device) -> LayoutBlocks:
    """The rows in blocks of queries and of keys, for fastdpo's kernels."""
    from ...kernels.attention_blocks import LayoutBlocks

    with torch.device("cpu"):  # independent of torch.set_default_device
        checked = checked_rows(rows, tokens)
        pieces = [(i, *piece) for i, row in enumerate(checked) for piece in row.pieces]
        pieces = torch.tensor(pieces, dtype=torch.long).view(-1, 4)
        reader, start, length, _ = pieces.unbind(1)
        _, prefix_length, own, own_length = rows.long().unbind(1)
        row, first = _blocks_of_rows(own_length, query_block)
        keys_seen = prefix_length[row] + torch.minimum(first + query_block, own_length[row])
        queries = torch.stack([row, first], 1)[keys_seen.argsort(descending=True, stable=True)]

        overlap = (start < (own + own_length)[:, None]) & (start + length > own[:, None])  # [row, piece]
        row, first = _blocks_of_rows(own_length, key_block)
        queries_seeing = (overlap * own_length[reader]).sum(1)[row] - first
        keys = torch.stack([row, first], 1)[queries_seeing.argsort(descending=True, stable=True)]
        first_piece = _offsets(reader.bincount(minlength=len(rows)))
        tensors = (rows, pieces, first_piece, queries, keys, overlap.nonzero()[:, 1], _offsets(overlap.sum(1)))
        return LayoutBlocks(*(to_device(x, device) for x in tensors))


def _blocks_of_rows(lengths: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The row of each block of `size` tokens, and the block's first token within the row."""
    counts = (lengths + size - 1) // size
    row = torch.arange(len(lengths)).repeat_interleave(counts)
    return row, (torch.arange(len(row)) - _offsets(counts)[row]) * size


def _offsets(lengths: Tensor) -> Tensor:
    """[n + 1] start of each of n contiguous pieces, and the end of the last."""
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])


def varlen_layout(rows: Tensor, tokens: int, device: torch.device) -> VarlenLayout:
    """The rows as sequences of variable length, for libraries of flash attention."""
    with torch.device("cpu"):  # independent of torch.set_default_device
        checked = checked_rows(rows, tokens)
        own_length, lengths = rows[:, 3].long(), rows[:, 1].long() + rows[:, 3]
        cu_queries, cu_keys = _offsets(own_length), _offsets(lengths)
        max_queries, max_keys = (int(x.max()) if len(x) else 0 for x in (own_length, lengths))
        places = None
        if rows[:, 1].any():
            pieces = [piece for row in checked for piece in row.pieces]
            index = torch.cat([torch.arange(start, start + length) for start, length, _ in pieces])
            first_reader = _offsets(index.bincount(minlength=tokens))
            tensors = (index, index.argsort(stable=True), first_reader)
            places = KeyPlaces(*(to_device(x, device) for x in tensors))
        cu_queries, cu_keys = (to_device(x, device) for x in (cu_queries, cu_keys))
        return VarlenLayout(cu_queries, cu_keys, max_queries, max_keys, places)
