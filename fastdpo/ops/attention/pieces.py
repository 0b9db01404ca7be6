"""Packed attention in pieces: which queries see which keys, and two ways to compute a piece.

A piece is the attention of one block of queries to one contiguous range of keys. Key j is visible
to query i iff `0 <= offset + i - j < window`, where offset is the position of the first query minus
that of the first key. The queries [0, n) of a row are divided into

    [0, unwindowed)    queries whose window hides nothing: they see their row, causally, and all of the prefix
    [unwindowed, n)    blocks of queries, each with the range of the row and those of the prefix that it sees

Dimensions: T packed tokens, H query heads, H_kv key heads, G = H / H_kv, n_q queries and n_k keys of
a piece, D and D_v head sizes, S rows of the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, reduce
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..devices import accumulation_dtype
from ..head.results import Transform
from .device_layout import Kind, Row, Rows

BLOCK = 128  # queries of a windowed block, which computes window + BLOCK scores per query and needs window of them
SCORE_BYTES = 64 << 20  # maximum size of a piece's scores, all heads together
CPU_SCORE_BYTES = 16 << 20  # the same on a CPU, where larger pieces do not stay in the caches


KeyRange = tuple[slice, int]
"""Contiguous keys that a block of queries sees, as a range of packed tokens, and their offset: the position of the
block's first query minus that of the first key.
"""


class QueryBlocks(NamedTuple):
    """Blocks of queries with the ranges of keys that they see."""

    blocks: list[tuple[slice, list[KeyRange]]]


def query_blocks(rows: Rows, window: int, max_scores: int | None) -> Iterator[tuple[slice, list[KeyRange]]]:
    """Blocks of queries with the keys that they see.

    These are a range of the row itself and the visible ranges of its prefix.

    Every query of a block sees at least one key of each range.

    Args:
        rows: of a layout.
        window: at most T.
        max_scores: maximum number of scores of one head in a piece; None if the scores are not
            stored.
    """
    for row in rows.checked:
        for start, end in _block_bounds(row, window, max_scores):
            first = max(0, start - window + 1)
            ranges = [(slice(row.own + first, row.own + end), start - first)]
            first_visible = row.prefix_length + start - window + 1
            for keys, length, position in row.prefix:
                hidden = max(0, first_visible - position)
                if hidden < length:
                    offset = row.prefix_length + start - position - hidden
                    ranges.append((slice(keys + hidden, keys + length), offset))
            yield slice(row.own + start, row.own + end), ranges


def _block_bounds(row: Row, window: int, max_scores: int | None) -> Iterator[tuple[int, int]]:
    """Start and end of a row's blocks of queries, each of which sees the same pieces of the prefix."""
    n = row.own_length
    if max_scores is None and row.prefix_length + n <= window:  # the general case, but faster
        yield 0, n
        return
    unwindowed = min(max(0, window - row.prefix_length), n)
    # Later queries see no key of the piece.
    last_visible = (x.position + x.length + window - 1 - row.prefix_length for x in row.prefix)
    longest = max(row.prefix_length, n)
    step = n if max_scores is None else max(1, max_scores // min(longest, window + BLOCK))
    windowed_starts = range(unwindowed, n, min(step, BLOCK))
    bounds = {*range(0, unwindowed, step), *windowed_starts, *(min(max(0, x), n) for x in last_visible), n}
    yield from pairwise(sorted(bounds))


class PiecesCall:
    """The call that no backend supports, as an `AttentionCall`."""

    def __init__(self, kind: Kind) -> None:
        scale, window, softcap = kind.options
        window = kind.tokens if window is None else min(window, kind.tokens)
        is_flash = kind.device.type == "cpu" and softcap is None and flash_supports_scale(scale)
        self._pieces = CpuFlashPieces(kind, window) if is_flash else MatmulPieces(kind, window)

    def describe(self, rows: Rows) -> QueryBlocks:
        return QueryBlocks([*query_blocks(rows, self._pieces.window, self._pieces.max_scores)])

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: QueryBlocks
    ) -> tuple[Tensor, Tensor]:
        out, lse = empty_outputs(query, value)
        inputs = (*map(with_last_stride_1, (query, key, value)), out)  # torch's flash attention relies on it unchecked
        q, k, v, o = (x.transpose(0, 1)[None] for x in inputs)  # [1, H, T, D]
        with torch.autocast(query.device.type, enabled=False):
            for block, ranges in layout.blocks:
                queries = q[:, :, block]
                results = [
                    self._pieces.forward(queries, k[:, :, keys], v[:, :, keys], offset) for keys, offset in ranges
                ]
                o[:, :, block], lse[None, :, block] = reduce(merge, results)
            return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, layout: QueryBlocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        dquery = torch.zeros_like(query, memory_format=torch.contiguous_format)
        dkey, dvalue = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (key, value))  # sums
        tensors = (*map(with_last_stride_1, (grad, query, key, value, out)), dquery, dkey, dvalue)
        g, q, k, v, o, dq, dk, dv = (x.transpose(0, 1)[None] for x in tensors)  # [1, H, T, D]
        with torch.autocast(query.device.type, enabled=False):
            for block, ranges in layout.blocks:
                block_grad, queries, outs, lses = (x[:, :, block] for x in (g, q, o, lse[None]))
                for keys, offset in ranges:
                    inputs = block_grad, queries, outs, lses, k[:, :, keys], v[:, :, keys], offset
                    gradients = self._pieces.backward(*inputs)
                    for total, tokens, gradient in zip((dq, dk, dv), (block, keys, keys), gradients, strict=True):
                        total[:, :, tokens].add_(gradient)
        return dquery, dkey.to(key.dtype), dvalue.to(value.dtype)


def empty_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """out [T, H, D_v] and log-sum-exps [H, T] without values."""
    (t, h, _), (_, _, d_v) = query.shape, value.shape
    return query.new_empty(t, h, d_v), query.new_empty(h, t, dtype=accumulation_dtype(query.dtype))


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of both pieces."""
    (out, lse), (other, other_lse) = a, b
    share = torch.sigmoid(other_lse - lse)[..., None]
    return torch.lerp(out.to(lse.dtype), other.to(lse.dtype), share), torch.logaddexp(lse, other_lse)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds sinks [H] to the softmax of an output, in place, and of its log-sum-exps.

    `out` is [T, H, D_v] and `lse` is [H, T].
    """
    logits = sinks.to(lse.dtype)[:, None]
    return out.mul_(torch.sigmoid(lse - logits).t()[..., None]), torch.logaddexp(lse, logits)


def flash_supports_scale(scale: float) -> bool:
    """Whether flash attention is correct with this scale.

    It masks with -inf and takes maxima before it scales, so the scale must be positive and normal.
    """
    return scale >= torch.finfo(torch.float32).tiny


def with_last_stride_1(x: Tensor) -> Tensor:
    """x, or a copy whose elements of one head are adjacent in memory, as all kernels require."""
    return x if x.stride()[-1] == 1 else x.contiguous()


def _visible(n_q: int, n_k: int, offset: int, window: int, device: torch.device) -> Tensor:
    """bool [n_q, n_k], True where the query sees the key."""
    return torch.ones(n_q, n_k, dtype=torch.bool, device=device).tril_(offset).triu_(offset - window + 1)


class CpuFlashPieces:
    """Pieces by torch's flash attention for the CPU.

    It needs D_v = D: the smaller one is padded with zeros.
    """

    max_scores = None

    def __init__(self, kind: Kind, window: int):
        self.window, self.scale, self.dtype = window, kind.options.scale, kind.dtype
        self.head_sizes = kind.d, kind.d_v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """out [1, H, n_q, D_v] and log-sum-exp [1, H, n_q].

        q is [1, H, n_q, D], k is [1, H_kv, n_k, D] and v is [1, H_kv, n_k, D_v].
        """
        d, d_v = self.head_sizes
        if d != d_v:
            q, k, v = _padded_to_one_size(q, k, v)
        causal, mask = self._masks(q, k, offset)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(q, k, v, 0.0, causal, attn_mask=mask, scale=self.scale)
        suspect = lse == 0  # torch returns zeros where scores are NaN or all -inf
        if suspect.any() and self._may_overflow(q, k, lse.dtype):
            suspect &= ~out.any(-1)
            lse.masked_fill_(suspect, torch.nan)
            out.masked_fill_(suspect[..., None], torch.nan)
        return (out if d == d_v else out[..., :d_v]), lse

    def backward(
        self, g: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, offset: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, from the out and lse of all pieces together."""
        d, d_v = self.head_sizes
        if d != d_v:
            g, q, k, v, out = _padded_to_one_size(g, q, k, v, out)
        causal, mask = self._masks(q, k, offset)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = attend(g, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=self.scale)
        return (dq, dk, dv) if d == d_v else (dq[..., :d], dk[..., :d], dv[..., :d_v])

    def _may_overflow(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> bool:
        """Whether a score may be NaN or infinite."""
        bound = q.shape[3] * self.scale
        for x in (q, k):
            low, high = x.aminmax()
            bound *= max(-float(low), float(high))
        return not bound < torch.finfo(dtype).max  # also true for NaN

    def _masks(self, q: Tensor, k: Tensor, offset: int) -> tuple[bool, Tensor | None]:
        """Whether the kernel masks causally, and the mask that it adds to the scores, if any."""
        n_q, n_k = q.shape[2], k.shape[2]
        if offset + n_q <= self.window and (offset == 0 or offset >= n_k):
            return offset == 0, None
        return False, self._band[:n_q, self.window - 1 - offset :][:, :n_k]

    @cached_property
    def _band(self) -> Tensor:
        """[BLOCK, window + BLOCK - 1] of 0 and -inf, float32 or float64.

        Every mask is a slice of it.
        """
        visible = _visible(BLOCK, self.window + BLOCK - 1, self.window - 1, self.window, torch.device("cpu"))
        return torch.zeros_like(visible, dtype=accumulation_dtype(self.dtype)).masked_fill_(~visible, -torch.inf)


def _padded_to_one_size(*tensors: Tensor) -> list[Tensor]:
    """Pads the last dimension with zeros to one size, which does not change products."""
    size = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, size - x.shape[-1])) for x in tensors]


class MatmulPieces:
    """Pieces by matrix products, for every device and option.

    The query heads that share a key head are rows of one product.
    """

    def __init__(self, kind: Kind, window: int):
        self.window, self.transform = window, Transform(kind.options.softcap, kind.options.scale, 1.0)
        available = CPU_SCORE_BYTES if kind.device.type == "cpu" else SCORE_BYTES
        self.max_scores = available // (kind.heads * accumulation_dtype(kind.dtype).itemsize)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """As `CpuFlashPieces.forward`."""
        scores = self._mask_(self._scores(_by_group(q, k), k), q, offset)
        lse = scores.logsumexp(-1, keepdim=True)
        p = scores.sub_(lse).exp_().to(v.dtype)
        return _by_head(p @ v, q), _by_head(lse, q)[..., 0]

    def backward(
        self, g: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, offset: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `CpuFlashPieces.backward`."""
        rows, g, out, lse = (_by_group(x, k) for x in (q, g, out, lse[..., None]))
        scores = self._scores(rows, k)
        slope = self.transform.slope(scores)
        p = self._mask_(scores, q, offset).sub_(lse).exp_()
        wide = p.dtype
        delta = torch.linalg.vecdot(g.to(wide), out.to(wide))[..., None]
        ds = g.to(wide) @ v.to(wide).mT  # not rounded: it must cancel delta where a query sees one key
        ds = ds.sub_(delta).mul_(p).mul_(self.transform.gain)
        ds = (ds if slope is None else ds.mul_(slope)).to(q.dtype)
        return _by_head(ds @ k, q), ds.mT @ rows, p.to(g.dtype).mT @ g

    def _scores(self, rows: Tensor, k: Tensor) -> Tensor:
        """Scores [1, H_kv, G n_q, n_k] before the mask."""
        return self.transform.apply_((rows @ k.mT).to(accumulation_dtype(k.dtype)))

    def _mask_(self, scores: Tensor, q: Tensor, offset: int) -> Tensor:
        """Sets scores of hidden keys to -inf, in place."""
        n_q, n_k = q.shape[2], scores.shape[3]
        if offset < n_k - 1 or offset + n_q > self.window:
            hidden = ~_visible(n_q, n_k, offset, self.window, q.device)
            scores.unflatten(2, (-1, n_q)).masked_fill_(hidden, -torch.inf)
        return scores


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """Reshapes [1, H, n, D] to [1, H_kv, G n, D]."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    """Reshapes [1, H_kv, G n, D] to [1, H, n, D]."""
    return x.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
