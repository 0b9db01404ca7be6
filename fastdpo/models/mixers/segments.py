"""Where the segments of packed tokens are, for functions that read tokens in order.

A shared prompt and its completions, `[P | C | R]`, are three segments. P is a root, because nothing
precedes it; C and R are branches of P. A row that shares no prefix is a root without branches. In
a deeper tree, the root of a row reaches to the last token behind which another row continues.
Roots may then begin alike, and their tokens occur in several of them.
"""

from __future__ import annotations

from bisect import bisect
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Sequences(NamedTuple):
    """Batches of sequences that contain all packed tokens.

    Attributes:
        batches: one or two of int64 [B, L], packed tokens; T, a token of zeros, at padding. With
            `bounds`, [1, L] without padding.
        place: int64 [T], where each packed token is in the flattened batches.
        parents: int64 [B] for each sequence of the second batch, the sequence of the first one in
            whose final state it begins; None if there is one batch.
        bounds: for each batch, the arguments of a kernel that say where its sequences begin and end: `cu_seqlens`,
            int64 [S + 1] on the device of the tokens, and `cu_seqlens_cpu`, the same on the CPU. None if each
            sequence is a row of its own.
    """

    batches: tuple[Tensor, ...]
    place: Tensor
    parents: Tensor | None = None
    bounds: tuple[dict[str, Tensor], ...] | None = None

    def chunks(self, size: int) -> int:
        """Number of chunks of this many tokens that a scan computes, padding included."""
        if self.bounds is not None:
            return sum(-(-length // size) for each in self.bounds for length in each["cu_seqlens_cpu"].diff().tolist())
        return sum(len(batch) * -(-batch.shape[1] // size) for batch in self.batches)


class Segments:
    """The segments of a layout.

    Args:
        rows: [S, 4], those of the `Layout`.
        device: of the indices.
    """

    def __init__(self, rows: list[list[int]], device: torch.device) -> None:
        self.tokens = rows[-1][2] + rows[-1][3]
        self.device = device
        self._halos: dict[int, tuple[Tensor, Tensor]] = {}
        starts = [own for _, _, own, _ in rows]
        self._rows: list[np.ndarray] = []
        self._prefix_lengths = [length for _, length, _, _ in rows]
        for prefix, length, own, own_length in rows:
            before = self._rows[bisect(starts, prefix + length - 1) - 1][:length] if length else np.arange(0)
            self._rows.append(np.concatenate([before, np.arange(own, own + own_length)]))

        is_end = np.zeros(self.tokens, dtype=bool)  # whether another row continues behind a token
        is_end[[prefix + length - 1 for prefix, length, _, _ in rows if length]] = True
        root_of: dict[int, int] = {}  # by its last token
        self._roots: list[np.ndarray] = []
        self._branches: list[np.ndarray] = []
        self._parents: list[int] = []
        for row in self._rows:
            ends = np.flatnonzero(is_end[row])
            root, branch = np.split(row, [ends[-1] + 1 if len(ends) else len(row)])
            if root[-1] not in root_of:
                root_of[root[-1]] = len(self._roots)
                self._roots.append(root)
            if len(branch):
                self._branches.append(branch)
                self._parents.append(root_of[root[-1]])

    @cached_property
    def whole_rows(self) -> Sequences:
        """Each row from its first token to its last. A shared prefix occurs in several rows."""
        return self._sequences(_padded(self._rows, self.tokens))

    @cached_property
    def shared(self) -> Sequences:
        """Roots in the first batch, branches in the second.

        Roots are padded on the left, where tokens of zeros leave a state of zeros as it is, so that
        the final state of a batch is that of every root.
        """
        roots = _padded(self._roots, self.tokens, left=True)
        branches = _padded(self._branches, self.tokens)
        return self._sequences(roots, branches)._replace(parents=self._move(np.array(self._parents)))

    @cached_property
    def whole_rows_in_one(self) -> Sequences:
        """`whole_rows` one behind the other."""
        return self._in_one_row(self._rows)

    @cached_property
    def shared_in_one(self) -> Sequences:
        """`shared`, with all roots in one row and all branches in another."""
        return self._in_one_row(self._roots, self._branches)._replace(parents=self._move(np.array(self._parents)))

    def sequences(self, chunk: int | None, in_one_row: bool = False) -> Sequences:
        """The sequences that need the fewest chunks of a scan.

        Args:
            chunk: number of tokens that the scan computes at once; None if it takes no initial
                state and therefore needs whole rows.
            in_one_row: whether the scan takes several sequences in one row.
        """
        if chunk is None or not self._branches:
            return self.whole_rows_in_one if in_one_row else self.whole_rows
        both = (self.whole_rows_in_one, self.shared_in_one) if in_one_row else (self.whole_rows, self.shared)
        return min(both, key=lambda sequences: sequences.chunks(chunk))

    def halos(self, reach: int) -> tuple[Tensor, Tensor]:
        """The own tokens of all rows in one sequence, each row's behind the `reach` tokens that precede them.

        Returns:
            int64 [1, M], packed tokens, and T, a token of zeros, before the first token of a row; int64 [T],
            where each packed token is among the own tokens of its row.
        """
        if reach not in self._halos:
            pieces, keep, end = [], np.empty(self.tokens, dtype=np.int64), 0
            for row, length in zip(self._rows, self._prefix_lengths, strict=True):
                before, segment = row[:length], row[length:]
                halo = before[max(0, len(before) - reach) :]
                pieces += [np.full(reach - len(halo), self.tokens), halo, segment]
                keep[segment] = end + reach + np.arange(len(segment))
                end += reach + len(segment)
            self._halos[reach] = self._move(np.concatenate(pieces)[None]), self._move(keep)
        return self._halos[reach]

    def _in_one_row(self, *groups: list[np.ndarray]) -> Sequences:
        ends = [np.cumsum([0, *map(len, group)]) for group in groups]
        bounds = ({"cu_seqlens": self._move(x), "cu_seqlens_cpu": torch.from_numpy(x)} for x in ends)
        return self._sequences(*(np.concatenate(group)[None] for group in groups))._replace(bounds=tuple(bounds))

    def _sequences(self, *batches: np.ndarray) -> Sequences:
        flat = np.concatenate([batch.ravel() for batch in batches])
        place = np.empty(self.tokens + 1, dtype=np.int64)
        place[flat[::-1]] = np.arange(len(flat))[::-1]  # the first place of a token in several rows
        return Sequences(tuple(map(self._move, batches)), self._move(place[: self.tokens]))

    def _move(self, indices: np.ndarray) -> Tensor:
        with torch.inference_mode(False):  # a later call may need them for a backward pass
            tensor = torch.from_numpy(indices)
            return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def segments_of(layout: Tensor, device: torch.device) -> Segments:
    """The segments of a layout's mask, computed once for its contents and a device.

    Gradient checkpointing passes copies of the mask, so its identity would not do.
    """
    return _segments_of(layout.cpu().numpy().tobytes(), device)


@lru_cache(16)
def _segments_of(rows: bytes, device: torch.device) -> Segments:
    return Segments(np.frombuffer(rows, dtype=np.int32).reshape(-1, 4).tolist(), device)


def gather(values: Tensor, dim: int, index: Tensor) -> Tensor:
    """Values of packed tokens as a batch of sequences, zero at padding. Differentiable.

    Args:
        values: [1, ..., T, ...], with the packed tokens in dimension `dim`.
        dim: at least 1.
        index: int64 [B, L], of packed tokens; T at padding.

    Returns:
        [B, ..., L, ...].
    """
    tokens = values[0].movedim(dim - 1, 0)  # [T, ...]
    tokens = torch.cat([tokens, tokens.new_zeros(1, *tokens.shape[1:])])
    return tokens.index_select(0, index.flatten()).unflatten(0, index.shape).movedim(1, dim)


def collect(batches: list[Tensor], dim: int, place: Tensor) -> Tensor:
    """Values of packed tokens [1, ..., T, ...] from batches [B, ..., L, ...] of sequences: undoes `gather`.

    `place` is that of the `Sequences`.
    """
    flat = torch.cat([batch.movedim(dim, 1).flatten(0, 1) for batch in batches])
    return flat.index_select(0, place).movedim(0, dim - 1)[None]


def gather_all(arguments: Any, dim: int, tokens: int, index: Tensor) -> Any:
    """Applies `gather` to the values of `tokens` packed tokens among a function's arguments, also in
    tuples and dictionaries. Other arguments are returned as they are.
    """
    if isinstance(arguments, dict):
        return {name: gather_all(x, dim, tokens, index) for name, x in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(gather_all(x, dim, tokens, index) for x in arguments)
    if not isinstance(arguments, Tensor) or arguments.dim() <= dim:
        return arguments
    return gather(arguments, dim, index) if (arguments.shape[0], arguments.shape[dim]) == (1, tokens) else arguments


def _padded(sequences: list[np.ndarray], padding: int, left: bool = False) -> np.ndarray:
    longest = max(map(len, sequences))
    batch = np.full((len(sequences), longest), padding)
    for row, sequence in zip(batch, sequences, strict=True):
        row[longest - len(sequence) if left else 0 :][: len(sequence)] = sequence
    return batch
