"""Islands of a layout: rows whose own tokens see each other in both directions.

The prefix of an island ends where the island itself ends. Attention over a layout with islands is
the attention over the same rows without islands, which any backend computes, merged with what the
tokens of an island see ahead of themselves. In reverse order that is causal attention once more:
queries n - 2 to 0 of an island of n tokens see its keys n - 1 to 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layout_cache import to_device


class Ahead(NamedTuple):
    """What the tokens of all islands see ahead of themselves, as a packed layout of A tokens.

    Attributes:
        queries: int32 [A], the packed tokens whose queries it takes. Each occurs once.
        keys: int32 [A], the packed tokens whose keys and values it takes. Each occurs once.
        rows: int32 [I, 4] on the CPU, one causal row for each island of more than one token.
    """

    queries: Tensor
    keys: Tensor
    rows: Tensor


def split(rows: Tensor, device: torch.device) -> tuple[Tensor, Ahead | None]:
    """The rows [S, 4] without islands, and what islands add to them, if there are any.

    Rows that are neither islands nor valid are returned as they are.
    """
    island = is_island(rows)
    if not island.any():
        return rows, None
    causal = rows.clone()
    causal[:, 1] = torch.where(island, rows[:, 2] - rows[:, 0], rows[:, 1])
    of_several = rows[island & (rows[:, 3] > 1)]
    return causal, _ahead(of_several, device) if len(of_several) else None


def is_island(rows: Tensor) -> Tensor:
    """bool [S], which rows [S, 4] are islands."""
    prefix, prefix_length, own, own_length = rows.unbind(1)
    ends_with_row = prefix + prefix_length == own + own_length
    return ends_with_row & (prefix >= 0) & (prefix <= own) & (own_length > 0)


def _ahead(islands: Tensor, device: torch.device) -> Ahead:
    """What the tokens of islands [I, 4] of several tokens each see ahead of themselves."""
    with torch.device("cpu"):  # independent of torch.set_default_device
        starts, lengths = islands[:, 2].tolist(), (islands[:, 3] - 1).tolist()
        queries = torch.cat([torch.arange(x + n - 1, x - 1, -1) for x, n in zip(starts, lengths, strict=True)])
        own = islands[:, 3] - 1
        start, zero = own.cumsum(0) - own, torch.zeros_like(own)
        rows = torch.stack([start, zero, start, own], 1).int()
        return Ahead(to_device(queries, device), to_device(queries + 1, device), rows)
