"""A layout's rows in the forms in which GPUs take them: made on the host once, and kept for all layers and both passes.

What is kept is found by the content of the rows, so that it does not matter by which way they came: gradient
checkpointing, for one, hands on other tensors than it was given.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import checks

if TYPE_CHECKING:
    from ..kernels.packed_attention import Blocks

LAYOUTS = 16  # of the last batches: a policy's, its reference's, and those of gradient accumulation


class Places(NamedTuple):
    """Where the keys of each row are gathered behind one another. int32 on the device."""

    index: Tensor  # [M] token whose key stands at each place
    readers: Tensor  # [M] places, those of token 0 first
    first_reader: Tensor  # [T + 1] where those of each token begin


class Varlen(NamedTuple):
    """Rows as sequences of several lengths, each with the keys of its prefix before its own. int32 on the device.

    `places` is None if no row has a prefix: then keys lie as they are wanted, and are not copied.
    """

    cu_queries: Tensor  # [S + 1]
    cu_keys: Tensor  # [S + 1]
    max_queries: int
    max_keys: int
    places: Places | None

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """In the order in which all kernels take them."""
        return self.cu_queries, self.cu_keys, self.max_queries, self.max_keys


def tiled(op: str, rows: Tensor, tokens: int) -> list[tuple[int, int, int, int]]:
    """The rows as numbers. They must tile [0, tokens): nothing may be read or left unwritten outside of them."""
    end, found = 0, []
    for prefix, prefix_length, own, own_length in rows.tolist():
        fits = own == end and own_length > 0 and prefix >= 0 and prefix_length >= 0 and prefix + prefix_length <= own
        row = (prefix, prefix_length, own, own_length)
        checks.require(fits, op, "rows", "tile [0, {}) in order, each after its prefix", row, tokens)
        end = own + own_length
        found.append(row)
    checks.require(end == tokens, op, "rows", "tile [0, {})", f"[0, {end})", tokens)
    return found


def blocks(op: str, rows: Tensor, tokens: int, of_queries: int, of_keys: int, device: torch.device) -> Blocks:
    """In blocks of so many tokens, for our kernels."""
    return _blocks(op, _content(rows), tokens, of_queries, of_keys, device)


def varlen(op: str, rows: Tensor, tokens: int, device: torch.device) -> Varlen:
    """For kernels that take sequences of several lengths."""
    return _varlen(op, _content(rows), tokens, device)


def _content(rows: Tensor) -> bytes:
    return rows.cpu().contiguous().numpy().tobytes()


def _rows(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.int32).view(-1, 4) if content else torch.zeros(0, 4).int()


def _move(x: Tensor, device: torch.device) -> Tensor:
    """int32 on the device, without waiting for it."""
    x = x.int()
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@lru_cache(LAYOUTS)
def _blocks(op: str, content: bytes, tokens: int, of_queries: int, of_keys: int, device: torch.device) -> Blocks:
    from ..kernels.packed_attention import Blocks

    with torch.device("cpu"):  # whatever torch.set_default_device says
        rows = _rows(content)
        tiled(op, rows, tokens)
        prefix, prefix_length, own, own_length = rows.long().unbind(1)
        row, first = _cut(own_length, of_queries)
        seen = prefix_length[row] + torch.minimum(first + of_queries, own_length[row])
        queries = torch.stack([row, first], 1)[seen.argsort(descending=True, stable=True)]

        overlap = prefix < (own + own_length)[:, None]  # [row, reader]
        overlap &= (prefix + prefix_length > own[:, None]) & (prefix_length > 0)
        row, first = _cut(own_length, of_keys)
        seeing = own_length[row] - first + (overlap * own_length).sum(1)[row]
        keys = torch.stack([row, first], 1)[seeing.argsort(descending=True, stable=True)]
        readers = overlap.nonzero()[:, 1]
        return Blocks(*(_move(x, device) for x in (rows, queries, keys, readers, _ends(overlap.sum(1)))))


def _cut(lengths: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Row and first token of each block of so many tokens of rows."""
    counts = (lengths + size - 1) // size
    row = torch.arange(len(lengths)).repeat_interleave(counts)
    return row, (torch.arange(len(row)) - _ends(counts)[row]) * size


def _ends(lengths: Tensor) -> Tensor:
    """[n + 1] where each begins that lies behind the others, and the last ends."""
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])


@lru_cache(LAYOUTS)
def _varlen(op: str, content: bytes, tokens: int, device: torch.device) -> Varlen:
    with torch.device("cpu"):  # whatever torch.set_default_device says
        rows = _rows(content)
        tiled(op, rows, tokens)
        prefix, prefix_length, own, own_length = rows.long().unbind(1)
        lengths = prefix_length + own_length
        cu_queries, cu_keys = _ends(own_length), _ends(lengths)
        longest, longest_keys = (int(x.max()) if len(x) else 0 for x in (own_length, lengths))
        places = None
        if prefix_length.any():
            row = torch.arange(len(rows)).repeat_interleave(lengths)
            position = torch.arange(len(row)) - cu_keys[row]
            in_prefix = position < prefix_length[row]
            index = torch.where(in_prefix, prefix[row] + position, own[row] + position - prefix_length[row])
            first_reader = _ends(index.bincount(minlength=tokens))
            places = Places(*(_move(x, device) for x in (index, index.argsort(stable=True), first_reader)))
        return Varlen(_move(cu_queries, device), _move(cu_keys, device), longest, longest_keys, places)
