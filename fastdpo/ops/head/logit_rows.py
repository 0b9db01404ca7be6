"""Log-probabilities, statistics and gradients of one tile of logits in plain PyTorch, and the products with
gradient tiles.

`token_logps` and `linear_logps` share this file wherever no Triton kernel runs. A tile z [n, V]
holds the transformed logits of n tokens, in float32 (float64 for float64 inputs). With y the
target, t the target's logit and m the largest of the other logits:

    others = sum_{v != y} exp(z_v - m)        logp = t - logsumexp(z) = logsigmoid(t - m - log(others))
    total  = others + exp(t - m)              d logp / d z_v = (v == y) - p_v
                                              p_v = exp(z_v - m) / total,  1 - p_y = others / total

The sum leaves the target out. A confident prediction (p_y close to 1) therefore loses no digits to
cancellation, and t may be more precise than the tile: a head computes it separately, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..devices import accumulation_dtype
from .results import Targets, Transform, empty_results, statistic_names

TILE_BYTES = 64 << 20
KERNEL_TILE_BYTES = 256 << 20  # where one kernel makes all passes
FULL_TILE_ROWS = 4096  # more rows hardly make matrix products, or sums of weight gradients over tiles, faster on a GPU
TILE_SHARE = 32  # a tile takes at most this part of a GPU's memory for that
MIN_TILE_ROWS = 256  # smaller tiles would read the head's weight too often
BLOCK_BYTES = 8 << 20  # part of a tile that stays in a CPU's caches while several passes are made over it
NORMALIZED_SUM = 2.0**10  # sum of the exponentials of the other entries in a 16-bit gradient tile
MIN_EXPONENT = -1e4  # its exponential is 0 in every dtype, and 0 * MIN_EXPONENT is 0 where 0 * -inf would be NaN


def row_slices(n: int, size: int, first: int = 0) -> list[slice]:
    """Slices of `size` rows that cover [first, n); the last one may be shorter."""
    return [slice(start, min(start + size, n)) for start in range(first, n, size)]


def tile_rows(vocabulary: int, dtype: torch.dtype) -> int:
    """Rows of a tile where several passes are made over it, each with memory of its own."""
    return max(MIN_TILE_ROWS, TILE_BYTES // (vocabulary * dtype.itemsize))


def kernel_tile_rows(vocabulary: int, dtype: torch.dtype, device_memory: int | None) -> int:
    """Rows of a tile where one kernel makes all passes, on a device with this many bytes.

    A multiple of the block sizes of matrix products.
    """
    row_bytes = vocabulary * dtype.itemsize
    full = min(FULL_TILE_ROWS * row_bytes, (device_memory or 0) // TILE_SHARE)
    return max(MIN_TILE_ROWS, max(KERNEL_TILE_BYTES, full) // row_bytes // MIN_TILE_ROWS * MIN_TILE_ROWS)


def block_slices(logits: Tensor, dtype: torch.dtype) -> list[slice]:
    """Slices of the rows of logits [n, V] over which several passes are made in `dtype`.

    On a CPU they fit in its caches; on other devices they are whole tiles.
    """
    n, vocabulary = logits.shape
    if logits.device.type != "cpu":
        return row_slices(n, tile_rows(vocabulary, dtype))
    return row_slices(n, max(1, BLOCK_BYTES // (vocabulary * dtype.itemsize)))


class GradientInputs(NamedTuple):
    """What the gradient of each row of logits is computed from besides the logits, [n] each, in the dtype of
    the tile.

    Attributes:
        shift: m.
        others, total: the sums.
        grad_logps, grad_entropy: upstream gradients. Without any, the result is the gradient tile.
    """

    shift: Tensor
    others: Tensor
    total: Tensor
    grad_logps: Tensor | None = None
    grad_entropy: Tensor | None = None

    def of_rows(self, rows: slice) -> GradientInputs:
        return GradientInputs(*(None if x is None else x[rows] for x in self))  # pyright: ignore[reportArgumentType]


class BlockSums(NamedTuple):
    """Sums over the vocabulary for each token of a block, [n] each.

    Those that no statistic needs are None.
    """

    target_logits: Tensor  # t, as precise as it is known
    tile_target_logits: Tensor  # t as it stands in the tile, for statistics of one consistent distribution
    shift: Tensor  # m
    others: Tensor
    weighted: Tensor | None  # sum_{v != y} exp(z_v - m) (z_v - m)
    mean: Tensor | None  # of all logits
    is_top1: Tensor | None
    squares: Tensor | None  # sum_{v != y} exp(z_v - m)^2

    @staticmethod
    def join(blocks: Sequence[BlockSums]) -> BlockSums:
        fields: Any = (None if field[0] is None else torch.cat(field) for field in zip(*blocks, strict=True))
        return BlockSums(*fields)


def sum_block_(z: Tensor, targets: Targets, target_logits: Tensor, statistics: str) -> tuple[BlockSums, Tensor]:
    """All passes over a block of logits.

    Args:
        z: [n, V] transformed logits. Overwritten.
        targets: of the block.
        target_logits: [n] the transformed logits of the targets, NaN for unknown targets.
        statistics: names from `results.STATISTICS`, comma-separated.

    Returns:
        The sums, and `exp(z - m)` [n, V] with 0 at the targets.
    """
    names = statistic_names(statistics)
    tile_target_logits = targets.read(z)
    tile_target_logits = torch.where(target_logits.isnan(), target_logits, tile_target_logits)
    mean = z.mean(-1) if "mean_logits" in names else None
    targets.write_(z, -torch.inf)
    peak = z.amax(-1)
    is_top1 = _is_top1(z, targets.index, tile_target_logits, peak) if "is_top1" in names else None
    shift = torch.where(peak == -torch.inf, target_logits, peak)  # only the target has a nonzero probability

    z.sub_(shift[:, None])
    weighted = squares = None
    if "entropy" in names or "log_sum_sq_probs" in names:
        exponentials = z.exp()
        if "entropy" in names:
            weighted = z.clamp_(min=MIN_EXPONENT).mul_(exponentials).sum(-1)
        if "log_sum_sq_probs" in names:
            squares = torch.mul(exponentials, exponentials, out=z).sum(-1)
    else:
        exponentials = z.exp_()
    others = exponentials.sum(-1)
    sums = BlockSums(target_logits, tile_target_logits, shift, others, weighted, mean, is_top1, squares)
    return sums, exponentials


def finish_sums(sums: BlockSums, statistics: str) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The log-probabilities; shift, others and total; and the requested statistics in the order of `STATISTICS`."""
    target_logits, tile_target_logits, shift, others, weighted, mean, is_top1, squares = sums
    # A logit of +inf would have probability 1 and no gradient, and its overflow would go unnoticed:
    # make it NaN.
    gap = torch.where(target_logits == torch.inf, torch.nan, target_logits - shift)
    logps, of_gradient = F.logsigmoid(gap - others.log()), [shift, others, others + gap.exp()]

    # Statistics include the target: sums over the vocabulary, relative to the larger of m and the
    # target's logit.
    top = torch.maximum(shift, tile_target_logits)
    target_gap = (tile_target_logits - top).clamp(min=MIN_EXPONENT)
    ratio, target_exp = (shift - top).exp(), target_gap.exp()
    total = others * ratio + target_exp
    log_total = torch.where(tile_target_logits > shift, (others * ratio).log1p(), total.log())
    values: dict[str, Any] = {"mean_logits": mean, "is_top1": is_top1}
    if weighted is not None:
        total_weighted = (weighted + others * (shift - top)) * ratio + target_exp * target_gap
        values["entropy"] = log_total - total_weighted / total
    if squares is not None:
        values["log_sum_sq_probs"] = (squares * ratio.square() + target_exp.square()).log() - 2 * log_total
    return logps, of_gradient, [values[name] for name in statistic_names(statistics)]


def _is_top1(z: Tensor, targets: Tensor, target_logits: Tensor, peak: Tensor) -> Tensor:
    """Whether the target is the first of the largest logits.

    z is -inf at the target, and `peak` is the maximum of the others.
    """
    tied = target_logits == peak
    if z.device.type == "cpu":  # few rows are tied; on other devices, selecting them would synchronize with the host
        rows = tied.nonzero()[:, 0]
        tied[rows] = targets[rows] < z[rows].argmax(-1)
    else:
        tied &= targets < z.argmax(-1)
    return tied | (target_logits > peak)


def join_results(blocks: Sequence[BlockSums], rows: Tensor, ignored: Tensor, statistics: str) -> list[Tensor]:
    """logps, shift, others, total and statistics of `rows` [N, ...], joined from blocks.

    Log-probabilities and statistics are 0 where `ignored`.
    """
    if not blocks:
        return empty_results(rows, statistics)
    logps, sums, extra = finish_sums(BlockSums.join(blocks), statistics)
    return [logps.masked_fill_(ignored, 0), *sums, *(x.masked_fill_(ignored, 0) for x in extra)]


def normalize(shift: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses the shift relative to which `others` is `NORMALIZED_SUM`.

    The target's entry of a gradient tile, `-NORMALIZED_SUM`, is then exact in 16 bits.

    Returns:
        The new shift, the new others, and the factor from old to new exponentials. [n] each
    """
    normalized = shift + torch.where(others > 0, (others / NORMALIZED_SUM).log(), 0.0)
    factor = (shift - normalized).exp()  # accounts for the rounding of the new shift
    return normalized, others * factor, factor


def gradient_tile_(exponentials: Tensor, targets: Targets, others: Tensor, slope: Tensor | None) -> Tensor:
    """Turns `exp(z - m)` [n, V] into the gradient tile, in place.

    Multiplied by `-gain / total` per row, the tile is `d logp / d x`.

    The tile is left unscaled so that the upstream gradient and the normalizer multiply rows of
    [n, D] in float32 instead of a tile.
    """
    targets.write_(exponentials, -others)
    return exponentials if slope is None else exponentials.mul_(slope)


def store(place: Tensor, block: Tensor) -> None:
    """Copies a block to its place in a tile, unless it was computed there."""
    if block.data_ptr() != place.data_ptr():
        place.copy_(block)


def results_in_torch(
    logits: Tensor,
    targets: Targets,
    statistics: str,
    transform: Transform,
    target_logits: Tensor | None = None,
    gradient: Tensor | None = None,
    narrow: bool = False,
) -> list[Tensor]:
    """logps, shift, others, total and statistics of logits [n, V], [n] each.

    Args:
        logits: before their transform. They are overwritten if `target_logits` are given.
        targets: of their rows.
        statistics: the requested ones.
        transform: of the logits.
        target_logits: the transformed logits [n] of the targets, as precise as they are known; else they are read.
        gradient: memory [n, V] for the gradient tile, which may be the logits.
        narrow: whether the tile is `normalize`d, since it has a narrower dtype than sums.
    """
    parts, dtype = [], accumulation_dtype(logits.dtype)
    for rows in block_slices(logits, dtype):
        z, of_rows = transform.apply_(logits[rows].to(dtype, copy=target_logits is None)), targets.of_rows(rows)
        own = of_rows.read(z).masked_fill_(of_rows.unknown, torch.nan) if target_logits is None else target_logits[rows]
        slope = None if gradient is None else transform.slope(z)
        sums, exponentials = sum_block_(z, of_rows, own, statistics)
        if gradient is not None:
            others = sums.others
            if narrow:
                _, others, factor = normalize(sums.shift, others)
                exponentials.mul_(factor[:, None])
            store(gradient[rows], gradient_tile_(exponentials, of_rows, others, slope))
        parts.append(sums)
        del z, exponentials  # frees the block before the next one is allocated
    logps, shift, others, total, *extra = join_results(parts, logits, targets.ignored, statistics)
    if narrow:
        shift, others, factor = normalize(shift, others)
        total *= factor
    return [logps, shift, others, total, *extra]


def upstream_scale(upstream: Tensor, total: Tensor, transform: Transform) -> Tensor:
    """The factors [n] from rows of the gradient tile to `d loss / d x`.

    Zero where the upstream gradient is zero, even if the total is NaN.
    """
    return torch.where(upstream == 0, 0.0, upstream * (-transform.gain / total))


def logit_gradient(z: Tensor, targets: Targets, inputs: GradientInputs, transform: Transform) -> Tensor:
    """`d loss / d x` [n, V] from transformed logits z, which are overwritten, or the gradient tile."""
    shift, others, row_total, grad_logps, grad_entropy = inputs
    slope = transform.slope(z)
    gradient = None
    if grad_entropy is not None:
        # d entropy / d z_v = -p_v (log p_v + entropy). log p_v + entropy equals d_v = z_v - top
        # minus its mean, which keeps the digits that log p_v loses to the logarithm of the sum
        # where logits are large.
        target_logits = targets.read(z)
        top = torch.maximum(shift, target_logits)
        total = others * (shift - top).exp() + (target_logits - top).exp()
        gradient = torch.sub(z, top[:, None]).clamp_(min=MIN_EXPONENT)  # d
        exponentials = gradient.exp()
        mean = gradient.mul_(exponentials).sum(-1) / total
        total = total.masked_fill(row_total.isnan(), torch.nan)  # unknown targets
        scale = upstream_scale(grad_entropy, total, transform)
        gradient.addcmul_(exponentials, mean[:, None], value=-1).mul_(scale[:, None])
        del exponentials
        if slope is not None:
            gradient.mul_(slope)
        if grad_logps is None:
            return gradient
    tile = gradient_tile_(z.sub_(shift[:, None]).exp_(), targets, others, slope)
    if grad_logps is not None:
        tile.mul_(upstream_scale(grad_logps, row_total, transform)[:, None])
    return tile if gradient is None else gradient.add_(tile)


class GradientSum:
    """The gradient of a parameter: `scale * sum(tile.T @ rows)` over tiles, in a wide dtype.

    Args:
        out: [V, ...] memory for the gradient.
        dtype: the dtype of the sum. A sum in another dtype than `out` is kept separately and
            rounded once.
        scale: a scalar tensor, or None for 1.
    """

    def __init__(self, out: Tensor, dtype: torch.dtype, scale: Tensor | None) -> None:
        self.out, self.scale = out, scale
        self.total = out if scale is None and out.dtype == dtype else torch.empty_like(out, dtype=dtype)
        self.overwrite = True  # the first product replaces what `total` holds

    def add(self, tile: Tensor, rows: Tensor) -> None:
        """Adds `tile.T @ rows` for a tile [n, V] and rows [n, ...]."""
        total, beta = self.total, 0 if self.overwrite else 1  # beta 0 also ignores uninitialized memory
        if tile.dtype != total.dtype and tile.device.type == "cuda":
            torch.addmm(total, tile.t(), rows.to(tile.dtype), beta=beta, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, tile.t().to(total.dtype), rows.to(total.dtype), beta=beta, out=total)
        self.overwrite = False

    def finish(self) -> None:
        """Writes the gradient to `out`."""
        if self.scale is not None:
            self.total *= self.scale
        if self.total is not self.out:
            self.out.copy_(self.total)


def wide_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Writes `a @ b` to `out`, whose dtype may be wider; on CUDA it is not rounded to theirs first."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a @ b)


def split_row_scale(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Splits row factors [N] into factors [N] that `dtype` can represent and a common factor.

    Upstream gradients may be too small for float16. There, rows are multiplied by their share of
    the largest factor, and the sum over all rows by that factor. For other dtypes the common factor
    is None.
    """
    if dtype != torch.float16:
        return scale, None
    largest = scale.abs().amax().clamp(min=torch.finfo(scale.dtype).tiny)
    return scale / largest, largest


def empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized gradients of the inputs that need one, and empty tensors for the others."""
    grads = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if needed and x is not None else hidden.new_empty(0)
        for x, needed in zip((hidden, weight, bias), needs, strict=True)
    ]
    return grads[0], grads[1], grads[2]
