"""The products of queries and keys that a packed attention consists of, and two ways to compute one.

In a product key j is visible to query i iff `0 <= offset + i - j < window`, offset being the position of its first
query less that of its first key. A row's queries are cut into

    [0, free)    those to which nothing is out of the window: they see themselves, causally, and all of the prefix
    [free, n)    blocks, each with the stretch of the row and of the prefix that its queries see
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_layouts import tiled
from .dtypes import accumulation_dtype
from .logit_rows import Transform

BLOCK = 128  # queries of a window's block: it computes window + BLOCK scores a query, of which it needs window
SCORE_BYTES = 64 << 20  # of one product, all heads
CPU_SCORE_BYTES = 16 << 20  # fewer are slow to start, more fall out of the caches


class Keys(NamedTuple):
    at: slice
    offset: int


def blocks(op: str, rows: Tensor, tokens: int, window: int, room: int | None) -> Iterator[tuple[slice, list[Keys]]]:
    """Queries, and the keys that they see: of the row, then of its prefix. Each query sees some of both.

    Args:
        op: names the caller in errors.
        rows: [S, 4], which must tile [0, tokens): nothing may be read or left unwritten outside of them.
        tokens: T.
        window: at most T.
        room: how many scores of a head a product may have; None if they are not stored.
    """
    for prefix, prefix_length, own, own_length in tiled(op, rows, tokens):
        for a, b, sees_prefix in _cuts(prefix_length, own_length, window, room):
            first = max(0, a - window + 1)
            keys = [Keys(slice(own + first, own + b), a - first)]
            if sees_prefix:
                position = prefix_length + a
                first = max(0, position - window + 1)
                keys.append(Keys(slice(prefix + first, prefix + prefix_length), position - first))
            yield slice(own + a, own + b), keys


def _cuts(prefix_length: int, own_length: int, window: int, room: int | None) -> Iterator[tuple[int, int, bool]]:
    """Begin and end of a row's blocks of queries, and whether they see the prefix."""
    if room is None and prefix_length + own_length <= window:  # what follows says the same, less fast
        yield 0, own_length, prefix_length > 0
        return
    free = min(max(0, window - prefix_length), own_length)
    reach = min(window - 1, own_length) if prefix_length else 0  # queries from here on see nothing of the prefix
    longest = max(prefix_length, own_length)
    step = own_length if room is None else max(1, room // min(longest, window + BLOCK))
    cuts = {*range(0, free, step), *range(free, own_length, min(step, BLOCK)), reach, own_length}
    for a, b in pairwise(sorted(cuts)):
        yield a, b, a < reach


def _visible(n_q: int, n_k: int, offset: int, window: int, device: torch.device) -> Tensor:
    """bool [n_q, n_k]"""
    return torch.ones(n_q, n_k, dtype=torch.bool, device=device).tril_(offset).triu_(offset - window + 1)


class Flash:
    """torch's flash attention for the CPU, a call's worth. It takes values as wide as the keys; others are padded."""

    room = None

    def __init__(self, query: Tensor, value: Tensor, window: int, scale: float):
        self.window, self.scale, self.dtype = window, scale, query.dtype
        self.widths = query.shape[2], value.shape[2]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """out [1, H, n_q, D_v] and log-sum-exp [1, H, n_q], of q [1, H, n_q, D] and k, v [1, H_kv, n_k, D or D_v]."""
        d, d_v = self.widths
        if d != d_v:
            q, k, v = _equally_wide(q, k, v)
        causal, mask = self._masks(q, k, offset)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(q, k, v, 0.0, causal, attn_mask=mask, scale=self.scale)
        doubtful = lse == 0
        if doubtful.any() and self._may_overflow(q, k, lse.dtype):  # it returns zeros for NaN and for nothing but -inf
            doubtful &= ~out.any(-1)
            lse.masked_fill_(doubtful, torch.nan)
            out.masked_fill_(doubtful[..., None], torch.nan)
        return (out if d == d_v else out[..., :d_v]), lse

    def backward(
        self, g: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, offset: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, from the merged out and lse."""
        d, d_v = self.widths
        if d != d_v:
            g, q, k, v, out = _equally_wide(g, q, k, v, out)
        causal, mask = self._masks(q, k, offset)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = attend(g, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=self.scale)
        return (dq, dk, dv) if d == d_v else (dq[..., :d], dk[..., :d], dv[..., :d_v])

    def _may_overflow(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> bool:
        """Whether some score may be NaN or infinite."""
        bound = q.shape[3] * self.scale
        for x in (q, k):
            low, high = x.aminmax()
            bound *= max(-float(low), float(high))
        return not bound < torch.finfo(dtype).max  # NaN too

    def _masks(self, q: Tensor, k: Tensor, offset: int) -> tuple[bool, Tensor | None]:
        """Whether the kernel shall hide the future, and what it shall add to the scores."""
        n_q, n_k = q.shape[2], k.shape[2]
        if offset + n_q <= self.window and (offset == 0 or offset >= n_k):
            return offset == 0, None
        return False, self._band[:n_q, self.window - 1 - offset :][:, :n_k]

    @cached_property
    def _band(self) -> Tensor:
        """0 or -inf [BLOCK, window + BLOCK - 1], float32 or float64: every mask is a part of it."""
        visible = _visible(BLOCK, self.window + BLOCK - 1, self.window - 1, self.window, torch.device("cpu"))
        return torch.zeros_like(visible, dtype=accumulation_dtype(self.dtype)).masked_fill_(~visible, -torch.inf)


def _equally_wide(*tensors: Tensor) -> list[Tensor]:
    """Padded with zeros to one last dimension, which changes no product."""
    width = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, width - x.shape[-1])) for x in tensors]


class Math:
    """Matrix products, for every device and feature. The query heads of a key's head are rows of one product."""

    def __init__(self, query: Tensor, window: int, scale: float, softcap: float | None):
        self.window, self.transform = window, Transform(softcap, scale, 1.0)
        available = CPU_SCORE_BYTES if query.device.type == "cpu" else SCORE_BYTES
        self.room = available // (query.shape[1] * accumulation_dtype(query.dtype).itemsize)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """As `Flash.forward`."""
        scores = self._hide(self._scores(_by_group(q, k), k), q, offset)
        lse = scores.logsumexp(-1, keepdim=True)
        p = scores.sub_(lse).exp_().to(v.dtype)
        return _by_head(p @ v, q), _by_head(lse, q)[..., 0]

    def backward(
        self, g: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, offset: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Flash.backward`."""
        rows, g, out, lse = (_by_group(x, k) for x in (q, g, out, lse[..., None]))
        scores = self._scores(rows, k)
        slope = self.transform.slope(scores)
        p = self._hide(scores, q, offset).sub_(lse).exp_()
        wide = p.dtype
        delta = torch.linalg.vecdot(g.to(wide), out.to(wide))[..., None]
        ds = g.to(wide) @ v.to(wide).mT  # unrounded: where a row sees one token, it is delta
        ds = ds.sub_(delta).mul_(p).mul_(self.transform.gain)
        ds = (ds if slope is None else ds.mul_(slope)).to(q.dtype)
        return _by_head(ds @ k, q), ds.mT @ rows, p.to(g.dtype).mT @ g

    def _scores(self, rows: Tensor, k: Tensor) -> Tensor:
        """[1, H_kv, G n_q, n_k], nothing hidden."""
        return self.transform.apply_((rows @ k.mT).to(accumulation_dtype(k.dtype)))

    def _hide(self, scores: Tensor, q: Tensor, offset: int) -> Tensor:
        n_q, n_k = q.shape[2], scores.shape[3]
        if offset < n_k - 1 or offset + n_q > self.window:
            hidden = ~_visible(n_q, n_k, offset, self.window, q.device)
            scores.unflatten(2, (-1, n_q)).masked_fill_(hidden, -torch.inf)
        return scores


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """[1, H, n, D] as [1, H_kv, G n, D]."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    """[1, H_kv, G n, D] as [1, H, n, D]."""
    return x.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
