"""What one pass over a tile of logits yields, in plain torch: the part that heads and given logits share.

A tile is `z [n, V]`, the transformed logits of n tokens. With y the target, m the largest of the other logits and
t the target's own logit,

    others = sum_{v != y} exp(z_v - m)        logp = t - logsumexp(z) = logsigmoid(t - m - log(others))
    total  = others + exp(t - m)              d logp / d z_v = (v == y) - p_v
                                              p_v = exp(z_v - m) / total,  1 - p_y = others / total

The target stays out of the sum, so that a confident prediction (p_y near 1) loses no digits to cancellation, and t may
be more precise than the tile that the sum is taken over. Tiles are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_BYTES = 64 << 20
KERNEL_TILE_BYTES = 256 << 20  # where one kernel makes all passes: a GPU multiplies fewer rows than fit here less well
TILE_ROWS = 256  # fewer would read the head's weight too often
BLOCK_BYTES = 8 << 20  # of a tile: what a CPU's caches hold while several passes go over it
LEVEL = 2.0**10  # what the others sum up to in a 16-bit tile
NEVER = -1e4  # exp(NEVER) is 0 in every dtype, and 0 * NEVER is not the NaN that 0 * -inf would be


def cuts(n: int, rows: int) -> list[slice]:
    """Rows [0, n) in slices of so many: the same cuts for every n."""
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]


def tile_rows(vocabulary: int, dtype: torch.dtype) -> int:
    """Rows of a tile that several passes are made over, each in its own memory."""
    return max(TILE_ROWS, TILE_BYTES // (vocabulary * dtype.itemsize))


def kernel_tile_rows(vocabulary: int, dtype: torch.dtype) -> int:
    """Rows of a tile that one kernel makes all passes over: whole blocks of a matrix product."""
    return max(TILE_ROWS, KERNEL_TILE_BYTES // (vocabulary * dtype.itemsize) // TILE_ROWS * TILE_ROWS)


def blocks(n: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> list[slice]:
    """Rows [0, n) in slices that several passes are made over: what a CPU's caches hold; elsewhere tiles."""
    if device.type != "cpu":
        return cuts(n, tile_rows(vocabulary, dtype))
    return cuts(n, max(1, BLOCK_BYTES // (vocabulary * dtype.itemsize)))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of values of this dtype are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Transform(NamedTuple):
    """Head outputs to logits: `z = softcap * tanh(scale * x / softcap) / temperature`."""

    softcap: float | None
    scale: float
    temperature: float

    def apply_(self, x: Tensor) -> Tensor:
        """In place, in the dtype of x."""
        if self.scale != 1.0:
            x.mul_(self.scale)
        if self.softcap is not None:
            x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x if self.temperature == 1.0 else x.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | None:
        """`d z / d x` less the constant `gain`, from z; None where it is 1."""
        return None if self.softcap is None else 1 - (z * (self.temperature / self.softcap)).square()

    @property
    def gain(self) -> float:
        return self.scale / self.temperature


class RowSums(NamedTuple):
    """Per token, in the tile's dtype: all that the gradient needs beside the logits."""

    logps: Tensor  # [n]
    shift: Tensor  # [n] m
    others: Tensor  # [n]
    total: Tensor  # [n]


class BlockSums(NamedTuple):
    """What is read off a block of logits, per token, all [n]. What no statistic asked for is None."""

    target_logits: Tensor  # t, as precise as it is known
    own: Tensor  # t as the tile has it: statistics are taken over one distribution
    shift: Tensor
    others: Tensor
    weighted: Tensor | None  # sum exp(z - m) (z - m), over the others
    mean: Tensor | None  # of all logits
    is_top1: Tensor | None
    squares: Tensor | None  # sum exp(z - m)^2, over the others

    @staticmethod
    def join(parts: Sequence[BlockSums]) -> BlockSums:
        fields: Any = (None if field[0] is None else torch.cat(field) for field in zip(*parts, strict=True))
        return BlockSums(*fields)


def fold(z: Tensor, targets: Tensor, target_logits: Tensor, statistics: str) -> tuple[BlockSums, Tensor]:
    """All passes over a block: its sums, and `exp(z - m)` with 0 at the targets.

    Args:
        z: [n, V] transformed logits. Overwritten.
        targets: [n] ids in the vocabulary.
        target_logits: [n] the targets' transformed logits.
        statistics: names out of `results.STATISTICS`, comma-separated.
    """
    column = targets[:, None]
    own = z.gather(1, column)[:, 0]
    own = torch.where(target_logits.isnan(), target_logits, own)  # of a target outside the vocabulary
    mean = z.mean(-1) if "mean_logits" in statistics else None
    z.scatter_(1, column, -torch.inf)
    peak = z.amax(-1)
    is_top1 = _is_top1(z, targets, own, peak) if "is_top1" in statistics else None
    shift = torch.where(peak == -torch.inf, target_logits, peak)  # nothing but the target is possible

    z.sub_(shift[:, None])
    weighted = squares = None
    if "entropy" in statistics or "log_sum_sq_probs" in statistics:
        exponentials = z.exp()
        if "entropy" in statistics:
            weighted = z.clamp_(min=NEVER).mul_(exponentials).sum(-1)
        if "log_sum_sq_probs" in statistics:
            squares = torch.mul(exponentials, exponentials, out=z).sum(-1)
    else:
        exponentials = z.exp_()
    others = exponentials.sum(-1)
    return BlockSums(target_logits, own, shift, others, weighted, mean, is_top1, squares), exponentials


def conclude(sums: BlockSums) -> tuple[RowSums, list[Tensor]]:
    """What follows for each token: its log-probability with the gradient's sums, and its statistics in their order."""
    target_logits, own, shift, others, weighted, mean, is_top1, squares = sums
    # An infinite target would be certain, and its gradient zero: an overflow must be seen.
    gap = torch.where(target_logits == torch.inf, torch.nan, target_logits - shift)
    row_sums = RowSums(F.logsigmoid(gap - others.log()), shift, others, others + gap.exp())

    # The statistics count the target too: everything relative to the larger of m and its logit.
    top = torch.maximum(shift, own)
    own_gap = (own - top).clamp(min=NEVER)
    ratio, own_exp = (shift - top).exp(), own_gap.exp()
    everything = others * ratio + own_exp
    log_everything = torch.where(own > shift, (others * ratio).log1p(), everything.log())
    entropy = log_sum_sq_probs = None
    if weighted is not None:
        inner = (weighted + others * (shift - top)) * ratio + own_exp * own_gap
        entropy = log_everything - inner / everything
    if squares is not None:
        log_sum_sq_probs = (squares * ratio.square() + own_exp.square()).log() - 2 * log_everything
    return row_sums, [x for x in (entropy, mean, is_top1, log_sum_sq_probs) if x is not None]


def _is_top1(z: Tensor, targets: Tensor, own: Tensor, peak: Tensor) -> Tensor:
    """Whether the target is the first of the largest, where z holds -inf at the target and peak is its maximum."""
    tied = own == peak
    if z.device.type == "cpu":  # few rows are tied, and elsewhere finding them would cost a synchronisation
        rows = tied.nonzero()[:, 0]
        tied[rows] = targets[rows] < z[rows].argmax(-1)
    else:
        tied &= targets < z.argmax(-1)
    return tied | (own > peak)


def level(shift: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The shift relative to which the others sum up to LEVEL, that sum, and by what exponentials are multiplied. [n]

    Rounded to 16 bits the gradient tile's entry at the target, -LEVEL, is exact then.
    """
    leveled = shift + torch.where(others > 0, (others / LEVEL).log(), 0.0)
    factor = (shift - leveled).exp()  # of the shift as it was rounded
    return leveled, others * factor, factor


def gradient_tile(exponentials: Tensor, targets: Tensor, others: Tensor, slope: Tensor | None) -> Tensor:
    """`exp(z - m)` turned, in place, into the gradient tile: times `-gain / total` a row it is `d logp / d x`.

    Left unscaled, so that the upstream gradient and the normaliser multiply rows of [n, D], in float32, and not a tile.
    """
    exponentials.scatter_(1, targets[:, None], -others[:, None])
    return exponentials if slope is None else exponentials.mul_(slope)


def gradient_tile_again(z: Tensor, targets: Tensor, sums: RowSums, slope: Tensor | None) -> Tensor:
    """The gradient tile, in place, from logits that were computed again and the sums of the first time."""
    return gradient_tile(z.sub_(sums.shift[:, None]).exp_(), targets, sums.others, slope)


def row_scale(total: Tensor, transform: Transform) -> Tensor:
    """What makes a row of the gradient tile `d logp / d x`. [n]"""
    return -transform.gain / total


def scaled_upstream(upstream: Tensor, total: Tensor, transform: Transform) -> Tensor:
    """What makes a row of the gradient tile `d loss / d x`: zero if upstream is, even where the total is NaN. [n]"""
    return torch.where(upstream == 0, 0.0, upstream * row_scale(total, transform))


def logit_gradient(
    z: Tensor,  # [n, V] overwritten
    targets: Tensor,  # [n]
    sums: RowSums,
    grad_logps: Tensor | None,  # [n]
    grad_entropy: Tensor | None,  # [n]
    transform: Transform,
) -> Tensor:
    """`d loss / d x` [n, V], scaled, from transformed logits and the gradients of their log-probs and entropies."""
    slope = transform.slope(z)
    tile = None
    if grad_entropy is not None:
        # d entropy / d z_v = -p_v (log p_v + entropy), in which log p_v + entropy is d_v = z_v - top less its mean:
        # the logarithm of the sum, of the size of z, would cost the digits of a logarithm of p.
        own = z.gather(1, targets[:, None])[:, 0]
        top = torch.maximum(sums.shift, own)
        total = sums.others * (sums.shift - top).exp() + (own - top).exp()
        tile = torch.sub(z, top[:, None]).clamp_(min=NEVER)  # d
        exponentials = tile.exp()
        mean = tile.mul_(exponentials).sum(-1) / total
        total = total.masked_fill(sums.total.isnan(), torch.nan)  # of a target outside the vocabulary
        scale = scaled_upstream(grad_entropy, total, transform)
        tile.addcmul_(exponentials, mean[:, None], value=-1).mul_(scale[:, None])
        del exponentials
        if slope is not None:
            tile.mul_(slope)
    if grad_logps is not None:
        scale = scaled_upstream(grad_logps, sums.total, transform)
        of_logps = gradient_tile_again(z, targets, sums, slope).mul_(scale[:, None])
        tile = of_logps if tile is None else tile.add_(of_logps)
    return torch.zeros_like(z) if tile is None else tile
