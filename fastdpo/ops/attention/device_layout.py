"""The rows of a layout: read once on the host, and written to the device in the form that a call takes.

Dimensions: T packed tokens, S rows of the layout, H query heads, H_kv key heads, D head size of queries and keys, D_v
head size of values.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import le
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ... import checks
from ..devices import is_capturing, is_host

OP = "packed_attention"
ALIGNMENT = 4  # values: Triton compiles kernels for pointers that are multiples of 16 bytes

L = TypeVar("L", bound=tuple)


class AttentionOptions(NamedTuple):
    """The options of `packed_attention`, with a default scale filled in."""

    scale: float
    window: int | None
    softcap: float | None


class Kind(NamedTuple):
    """What is known of a call before its rows: its backend and its kernels are chosen by this.

    Attributes:
        device, dtype: of query, key and value.
        tokens, heads, d, key_heads, d_v: T, H, D, H_kv and D_v.
        options: of the call.
        deterministic: whether torch was told to use deterministic algorithms.
    """

    device: torch.device
    dtype: torch.dtype
    tokens: int
    heads: int
    d: int
    key_heads: int
    d_v: int
    options: AttentionOptions
    deterministic: bool

    @classmethod
    def of(cls, query: Tensor, value: Tensor, options: AttentionOptions) -> Kind:
        (tokens, heads, d), (_, key_heads, d_v) = query.shape, value.shape
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(query.device, query.dtype, tokens, heads, d, key_heads, d_v, options, deterministic)

    @property
    def features(self) -> dict[str, int]:
        """What kernels are compiled for, next to a dtype."""
        sizes = dict(d=self.d, d_v=self.d_v, heads=self.heads, key_heads=self.key_heads)
        return dict(sizes, windowed=self.options.window is not None, capped=self.options.softcap is not None)

    @property
    def of_kernels(self) -> Kind:
        """Equal for calls for which a library, and what gathers keys for it, run the same kernels, as far as is
        known.
        """
        _, window, softcap = self.options
        return self._replace(tokens=0, options=AttentionOptions(1.0, window and 1, softcap and 1.0))


class AttentionCall(Protocol):
    """Forward and backward of one kind of attention call. Tensors have the shapes of `packed_attention`.

    Both run inside of custom ops, where autograd records nothing: the backward must be explicit. All results must be
    contiguous, since compilers rely on it.
    """

    def describe(self, rows: Rows) -> Any:
        """What both passes read of the rows: a tuple as `DeviceLayout` takes it."""
        ...

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: Any
    ) -> tuple[Tensor, Tensor]:
        """out [T, H, D_v] and log-sum-exps of the scores [H, T], both with the sinks included.

        `layout` holds the tensors of `describe` on the device.
        """
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, layout: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        ...


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


class Ahead(NamedTuple):
    """What the tokens of islands see ahead of themselves, as a packed layout of A tokens.

    Attributes:
        queries: [A], the packed tokens whose queries it takes. Each occurs once.
        keys: [A], the packed tokens whose keys and values it takes. Each occurs once.
    """

    queries: Tensor
    keys: Tensor


_living: WeakSet[Rows] = WeakSet()


class Rows:
    """The rows of a layout as the host reads them, once for all layers and passes.

    The prefix of an island ends where the island itself ends: its tokens see each other in both directions. Attention
    over islands is the attention over the same rows without islands, which any backend computes, merged with what
    their tokens see ahead of themselves. In reverse order that is causal attention once more: queries n - 2 to 0 of
    an island of n tokens see its keys n - 1 to 1.

    Attributes:
        given: the bytes of the rows, int32 [S, 4].
        tokens: T.
        causal: the rows without islands.
        checked: the same, with the pieces of their prefixes.
        longest: the tokens of the longest row, with its prefix.
        ahead: what islands add, if there are any, and its rows, int32 [I, 4].
        prepared: what was prepared for each kind of call.
        room: whether, and how much, the layouts that are prepared have room for the rows of other batches.
        state: of the tensor that they were read from, when it was read.

    Raises:
        ValueError: the rows do not tile [0, tokens), so kernels would read or leave unwritten
            memory outside of them, or a prefix is not the beginning of a row before.
    """

    def __init__(self, given: bytes, tokens: int) -> None:
        self.given, self.tokens, self.prepared, self.room = given, tokens, {}, 0
        self.state: tuple = given, tokens
        self._described: list[tuple[AttentionCall, tuple]] = []
        self._padded: Rows | None = None
        _living.add(self)
        self.causal, islands = [], []
        for prefix, length, own, own_length in np.frombuffer(given, dtype=np.int32).reshape(-1, 4).tolist():
            is_island = prefix + length == own + own_length and 0 <= prefix <= own and own_length > 0
            self.causal.append((prefix, own - prefix if is_island else length, own, own_length))
            if is_island and own_length > 1:
                islands.append(range(own + own_length - 2, own - 1, -1))
        self.checked = _checked(self.causal, tokens)
        self.longest = max((x.prefix_length + x.own_length for x in self.checked), default=0)
        self.ahead = None
        if islands:
            queries = torch.tensor([x for island in islands for x in island], device="cpu")
            ends = offsets(torch.tensor([len(x) for x in islands], device="cpu"))
            starts, zeros = ends[:-1], torch.zeros_like(ends[1:])
            self.ahead = Ahead(queries, queries + 1), torch.stack([starts, zeros, starts, ends.diff()], 1).int()

    def padded(self, tokens: int) -> Rows:
        """These rows and, up to a number of tokens, further ones that share nothing, none longer than the longest."""
        if tokens == self.tokens:
            return self
        if self._padded is None or self._padded.tokens != tokens:
            starts = np.arange(self.tokens, tokens, self.longest)
            further = np.stack([starts, 0 * starts, starts, np.diff(starts, append=tokens)], 1)
            self._padded = Rows(self.given + further.astype(np.int32).tobytes(), tokens)
        return self._padded

    def described(self, call: AttentionCall) -> tuple:
        """What a call reads of the rows, kept for equal calls of other models."""
        known = next((host for other, host in self._described if other == call), None)
        if known is None:
            self._described.append((call, known := call.describe(self)))
        return known

    def sizes_with_room(self, host: tuple) -> tuple[int, ...]:
        """`sizes_of` a description, and room for others of as many tokens: none for what each token has one of."""
        return tuple(n if n == self.tokens + 1 else n + self.room * (n // 4 + 64) for n in sizes_of(host))


def _checked(rows: Sequence[tuple[int, int, int, int]], tokens: int) -> list[Row]:
    end, checked, starts = 0, [], []
    for row in rows:
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


_ROWS = "_fastdpo_rows"
"""The attribute of a storage that holds its rows. Gradient checkpointing passes on other tensors with this storage."""


def rows_of(rows: Tensor, tokens: int) -> Rows:
    """The rows [S, 4] of a call, or of the mask [1, 1, S, 4] that a model's layers are given.

    They are kept for as long as the memory of the tensor is. A write to a mask is seen by its version, since usually
    all layers are given the same one, and any other write by the values.

    Raises:
        ValueError: see `Rows`.
    """
    if not is_host(rows.device):  # an engine moves the mask to the device for each layer
        return _rows_of_copy(rows.cpu().numpy().tobytes(), tokens)
    of_storage = vars(rows.untyped_storage())
    of_model = rows.dim() == 4 and not rows.is_inference()
    state = (rows._version, rows.data_ptr(), rows.shape, tokens) if of_model else (rows.numpy().tobytes(), tokens)
    found: Rows | None = of_storage.get(_ROWS)
    if found is None or state not in (found.state, (found.given, found.tokens)):
        found = of_storage[_ROWS] = Rows(rows.numpy().tobytes(), tokens)
        found.state = state
    return found


_rows_of_copy = lru_cache(8)(Rows)


def forget() -> None:
    """Forgets what was prepared for all rows."""
    _rows_of_copy.cache_clear()
    for rows in _living:
        rows.prepared.clear()


class DeviceLayout(Generic[L]):
    """A description of rows on a device: int32 tensors that one copy fills, and that further copies fill with others.

    A kernel that was recorded with these tensors, as by a CUDA graph, computes the rows that they hold when it is
    replayed. A tensor with room for more entries than its rows need repeats its last one, which stands for nothing:
    the end of all rows in offsets, and a program without tokens in a list of programs.

    Args:
        host: a tuple of tensors of the CPU with at least one entry, ints, other values, and further such tuples.
        device: of `contents`.
        sizes: the entries of each tensor and the largest value of each int, at least those of `host`, which are
            the default (see `sizes_of`).

    Attributes:
        contents: as `host`, with the tensors on the device, and `sizes` in the place of ints.

    Raises:
        ValueError: as `fill`.
    """

    def __init__(self, host: L, device: torch.device, sizes: Sequence[int] | None = None) -> None:
        self.sizes = sizes_of(host) if sizes is None else tuple(sizes)
        shapes = [(n, *x.shape[1:]) for x, n in zip(_leaves(host), self.sizes, strict=True) if isinstance(x, Tensor)]
        lengths = [_aligned(math.prod(shape)) for shape in shapes]
        self._written = torch.zeros(sum(lengths), dtype=torch.int32, device="cpu")
        self._buffer = torch.empty_like(self._written, device=device)
        places, views = (
            (part[: math.prod(shape)].view(shape) for part, shape in zip(flat.split(lengths), shapes, strict=True))
            for flat in (self._written, self._buffer)
        )
        self._places = [x.numpy() for x in places]
        leaves = zip(_leaves(host), self.sizes, strict=True)
        self.contents: L = _replaced(host, (n if isinstance(x, int) else next(views) for x, n in leaves))
        self.fill(host)

    def takes(self, host: L) -> bool:
        """Whether another description fits."""
        sizes = sizes_of(host)
        return len(sizes) == len(self.sizes) and all(map(le, sizes, self.sizes))

    def fill(self, host: L) -> None:
        """Writes another description, in the order of the stream and without a synchronization.

        Raises:
            ValueError: it does not fit, or the stream captures a CUDA graph. The copy would become a part of the
                graph, and the tensors would hold no values until the graph is replayed.
        """
        device = self._buffer.device
        checks.require(self.takes(host), OP, "rows", "fit in a layout of the sizes {}", sizes_of(host), self.sizes)
        if self._places:
            rule = "be used in a call before a CUDA graph captures them, as in the usual warm-up"
            checks.require(not is_capturing(device), OP, "rows", rule, "rows that no call has used")
            for x, place in zip((x for x in _leaves(host) if isinstance(x, Tensor)), self._places, strict=True):
                place[: x.shape[0]], place[x.shape[0] :] = x.numpy(), x[-1:].numpy()
            flat = self._written.pin_memory() if device.type == "cuda" else self._written.clone()
            self._buffer.copy_(flat, non_blocking=True)


def sizes_of(host: tuple) -> tuple[int, ...]:
    """The entries of each tensor of a description, and its ints, in their order."""
    return tuple(x if isinstance(x, int) else x.shape[0] for x in _leaves(host))


def offsets(lengths: Tensor) -> Tensor:
    """[n + 1] start of each of n contiguous pieces, and the end of the last."""
    return torch.cat([torch.zeros(1, dtype=torch.long, device="cpu"), lengths.cumsum(0)])


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _leaves(host: tuple) -> Iterator[Tensor | int]:
    """The tensors and the ints of a description."""
    for x in host:
        if isinstance(x, tuple):
            yield from _leaves(x)
        elif isinstance(x, (Tensor, int)):
            yield x


def _replaced(host: Any, leaves: Iterator[Tensor | int]) -> Any:
    """A description with other tensors and ints."""
    return host._make(
        _replaced(x, leaves) if isinstance(x, tuple) else next(leaves) if isinstance(x, (Tensor, int)) else x
        for x in host
    )
