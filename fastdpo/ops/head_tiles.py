"""A head in tiles of tokens: the logits of one tile at a time, their results and gradient.

Dimensions: N scored tokens, n tokens of one tile, V vocabulary, D hidden size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import kernel_trials
from .devices import constant_while_tracing, memory_of, suits_triton
from .dtypes import accumulation_dtype
from .head_table import fused_config
from .kernel_verdicts import Kernel, works
from .logit_rows import (
    RowSums,
    Transform,
    block_slices,
    gradient_tile_,
    gradient_tile_from_logits_,
    join_results,
    kernel_tile_rows,
    logit_gradient,
    normalize,
    row_slices,
    sum_block_,
    tile_rows,
)
from .results import statistic_names
from .targets import TileTargets, VocabularyPart, split_targets, targets_of_part

if TYPE_CHECKING:
    from ..kernels.linear_exp import FusedConfig

ALIGNMENT = 16  # elements: rows of a tile start where kernels load vectors, whatever the size of the vocabulary


class HeadCall(NamedTuple):
    """The common arguments of the forward and backward ops of a head.

    Custom ops take them flat.
    """

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]
    softcap: float | None
    logit_scale: float
    temperature: float
    compute_dtype: torch.dtype

    @property
    def transform(self) -> Transform:
        return Transform(self.softcap, self.logit_scale, self.temperature)


class TileFormat(NamedTuple):
    """Size, dtype and kernels of a head's tiles.

    Attributes:
        rows: tokens of a tile.
        columns: allocated columns of a tile, at least V.
        dtype: the dtype in which gradient tiles are stored and multiplied.
        triton: whether Triton kernels make the passes over a tile.
        fused: configuration of the kernel that also multiplies, or None if this head does not use
            it.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    triton: bool
    fused: FusedConfig | None

    @staticmethod
    def of(weight: Tensor, compute_dtype: torch.dtype, *, is_part: bool = False) -> TileFormat:
        """The format for a weight [V, D] that is multiplied in `compute_dtype`.

        One that has a part of the vocabulary does not use the fused kernel, whose exponentials are
        relative to the target's logit.
        """
        vocabulary, width = weight.shape
        float16_widened = torch.float32 if compute_dtype == torch.float16 else compute_dtype
        if not _takes_kernels(weight.device, compute_dtype):  # CPUs multiply faster in float32 than in float16
            rows = tile_rows(vocabulary, accumulation_dtype(compute_dtype))
            return TileFormat(rows, vocabulary, float16_widened, triton=False, fused=None)
        columns = -(-vocabulary // ALIGNMENT) * ALIGNMENT
        fused = None
        if weight.stride(1) == 1 and not is_part:
            fused = fused_config(width, compute_dtype, weight.device)
        if fused is not None:
            width = operator.index(width)  # a constant, also where the compiler takes sizes for symbols
            if not _takes_fused_kernel(weight.device, compute_dtype, width, fused, float16_widened):
                fused = None
        dtype = compute_dtype if fused is None else float16_widened  # the fused kernel does not normalize its tiles
        rows = kernel_tile_rows(columns, compute_dtype, memory_of(weight.device))
        return TileFormat(rows, columns, dtype, triton=True, fused=fused)

    def rows_within(self, n: int, budget: int) -> int:
        """How many of n tokens have gradient tiles that fit in `budget` bytes.

        All of them, or those of whole tiles.
        """
        fitting = budget // (self.columns * self.dtype.itemsize)
        return min(n, n if n <= fitting else fitting // self.rows * self.rows)

    def allocate(self, rows: int, weight: Tensor) -> Tensor:
        """Uninitialized memory [rows, V] on the device of the weight."""
        memory = torch.empty(rows, self.columns, dtype=self.dtype, device=weight.device)
        return memory[:, : weight.shape[0]]


@constant_while_tracing
def _takes_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    trials = kernel_trials.OF_LOGITS.items()
    return suits_triton(device, dtype) and all(works(Kernel(name, device, dtype), trial) for name, trial in trials)


@constant_while_tracing
def _takes_fused_kernel(
    device: torch.device, dtype: torch.dtype, width: int, config: FusedConfig, tile_dtype: torch.dtype
) -> bool:
    trial = partial(kernel_trials.linear_exp, width=width, config=config, tile_dtype=tile_dtype)
    return works(Kernel("linear_exp", device, dtype, (width, tuple(config))), trial)


class Head:
    """One call of a head, in its compute dtype, and the work on one tile of its tokens.

    With a `VocabularyPart`, the weight has that part's rows. Results and gradients are those of the
    part's distribution alone, to which a target outside of it adds nothing.
    """

    def __init__(self, op: str, call: HeadCall, part: VocabularyPart | None = None) -> None:
        dtype = self.dtype = call.compute_dtype
        self.format = TileFormat.of(call.weight, dtype, is_part=part is not None)
        vocabulary = len(call.weight) if part is None else part.vocabulary
        split = split_targets(op, call.targets, vocabulary)
        self.part, self.ignored, self.unknown = part, split.ignored, split.unknown
        if part is None:
            self.targets, self.columns = call.targets.contiguous(), TileTargets(split.index)
        else:
            self.targets, self.columns = targets_of_part(split, part)
        self.hidden, self.transform = call.hidden, call.transform
        self.weight = call.weight.to(dtype)
        self.bias = None if call.bias is None else call.bias.to(dtype).contiguous()
        self.accumulation_dtype = accumulation_dtype(dtype)
        self._scratch: dict[torch.dtype, Tensor] = {}

    def tiles(self, start: int = 0) -> list[slice]:
        """The tokens [start, N) in slices of one tile."""
        slices = row_slices(len(self.hidden) - start, self.format.rows)
        return [slice(start + rows.start, start + rows.stop) for rows in slices]

    def hidden_rows(self, rows: slice) -> Tensor:
        """Hidden states [n, D], zero where the target is ignored.

        This keeps their NaN and infinities from spreading.
        """
        return self.hidden[rows].to(self.dtype).masked_fill(self.ignored[rows, None], 0)

    def scratch(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Memory for one tile [n, V]. Every call with the same dtype returns the same memory."""
        if dtype not in self._scratch:
            size = min(len(self.hidden), self.format.rows)
            self._scratch[dtype] = self.format._replace(dtype=dtype).allocate(size, self.weight)
        return self._scratch[dtype][: rows.stop - rows.start]

    def results(self, rows: slice, statistics: str, gradient: Tensor | None) -> list[Tensor]:
        """logps, shift, others, total and statistics of one tile, [n] each.

        Those of a part are followed by its target logits [n]. Writes the gradient tile to `gradient`
        [n, V] if it is given.
        """
        h, targets = self.hidden_rows(rows), self.targets[rows]
        target_logits = self._target_logits(h, rows)
        if self.format.fused is not None and _fused_kernel_computes(statistics):
            from ..kernels.linear_exp import linear_exp_fwd

            operands = (h.contiguous(), self.weight, self.bias, targets, target_logits)
            return linear_exp_fwd(*operands, *self.transform, statistics, gradient, self.format.fused)
        if gradient is not None and gradient.dtype == self.dtype:
            logits = self._raw_logits(h, out=gradient)
        else:
            logits = self._raw_logits(h, out=self.scratch(rows, self.dtype))
        if self.format.triton:
            from ..kernels.token_logps import token_logps_fwd

            results = token_logps_fwd(logits, targets, *self.transform, statistics, target_logits, gradient)
        else:
            results = self._results_in_torch(rows, h, logits, target_logits, statistics, gradient)
        return results if self.part is None else [*results, target_logits]

    def _results_in_torch(
        self,
        rows: slice,
        hidden: Tensor,
        logits: Tensor,
        target_logits: Tensor,
        statistics: str,
        gradient: Tensor | None,
    ) -> list[Tensor]:
        columns, parts, narrow = self.columns.of_rows(rows), [], self.format.dtype != self.accumulation_dtype
        for block in self._blocks(logits):
            z = self.transform.apply_(logits[block].to(self.accumulation_dtype))
            slope = None if gradient is None else self.transform.slope(z)
            targets = columns.of_rows(block)
            sums, exponentials = sum_block_(z, targets, target_logits[block], statistics)
            if gradient is not None:
                others = sums.others
                if narrow:
                    _, others, factor = normalize(sums.shift, others)
                    exponentials.mul_(factor[:, None])
                _store(gradient[block], gradient_tile_(exponentials, targets, others, slope))
            parts.append(sums)
        logps, shift, others, total, *extra = join_results(parts, hidden, self.ignored[rows], statistics)
        if narrow:
            shift, others, factor = normalize(shift, others)
            total *= factor
        return [logps, shift, others, total, *extra]

    def gradient_tiles(self, kept: Tensor, sums: RowSums) -> Iterator[tuple[slice, Tensor]]:
        """The gradient tiles of all tokens, with their rows: first those in `kept`, then recomputed.

        Kept tiles come all at once if they can be multiplied without a wider copy.
        """
        keep, dtype = len(kept), kept.dtype
        if keep and (dtype == self.accumulation_dtype or self.format.triton):
            yield slice(0, keep), kept
        else:
            for rows in row_slices(keep, self.format.rows):
                yield rows, kept[rows]
        for rows in self.tiles(keep):
            yield rows, self._gradient_tile(rows, sums, dtype)

    def _gradient_tile(self, rows: slice, sums: RowSums, dtype: torch.dtype) -> Tensor:
        h, tile, tile_sums = self.hidden_rows(rows), self.scratch(rows, dtype), _rows_of(sums, rows)
        if self.format.fused is not None:
            from ..kernels.linear_exp import linear_exp_tile

            operands = (h.contiguous(), self.weight, self.bias, self.targets[rows], tile_sums.shift, tile_sums.others)
            linear_exp_tile(*operands, *self.transform, tile, self.format.fused)
            return tile
        logits = self._raw_logits(h, out=self.scratch(rows, self.dtype))
        if self.format.triton:
            from ..kernels.token_logps import token_logps_tile

            token_logps_tile(tile, logits, self.targets[rows], tile_sums, *self.transform)
            return tile
        columns = self.columns.of_rows(rows)
        for block in self._blocks(logits):
            z = self.transform.apply_(logits[block].to(self.accumulation_dtype))
            slope, block_sums = self.transform.slope(z), _rows_of(tile_sums, block)
            _store(tile[block], gradient_tile_from_logits_(z, columns.of_rows(block), block_sums, slope))
        return tile

    def logit_gradients(
        self,
        sums: RowSums,
        grad_logps: Tensor,
        grad_entropy: Tensor,
        dtype: torch.dtype,
        mean_offset: Tensor | None = None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """The gradient of every token's raw logits in tiles of `dtype`, with their rows.

        All logits are recomputed. `mean_offset` [N] is that of `logit_gradient`.
        """
        for rows in self.tiles():
            upstream = grad_logps[rows], grad_entropy[rows]
            offset = None if mean_offset is None else mean_offset[rows]
            yield rows, self._logit_gradient(rows, _rows_of(sums, rows), *upstream, offset, dtype)

    def _logit_gradient(
        self,
        rows: slice,
        sums: RowSums,
        grad_logps: Tensor,
        grad_entropy: Tensor,
        mean_offset: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        tile = self.scratch(rows, dtype)
        logits = self._raw_logits(self.hidden_rows(rows), out=self.scratch(rows, self.dtype))
        if self.format.triton:
            from ..kernels.token_logps import token_logps_bwd

            upstream = grad_logps, grad_entropy
            token_logps_bwd(tile, *upstream, logits, self.targets[rows], sums, *self.transform, mean_offset)
            return tile
        columns = self.columns.of_rows(rows)
        for block in self._blocks(logits):
            z = self.transform.apply_(logits[block].to(self.accumulation_dtype))
            upstream, block_sums = (grad_logps[block], grad_entropy[block]), _rows_of(sums, block)
            offset = None if mean_offset is None else mean_offset[block]
            gradient = logit_gradient(z, columns.of_rows(block), block_sums, *upstream, self.transform, offset)
            _store(tile[block], gradient)
        return tile

    def _raw_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits [n, V] before their transform, rounded to the compute dtype."""
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def _target_logits(self, hidden: Tensor, rows: slice) -> Tensor:
        """Transformed logits [n] of the targets, at least float32.

        NaN for unknown targets, -inf for absent ones.
        """
        index, absent = self.columns.of_rows(rows)
        if self.format.triton:
            from ..kernels.linear_logps import target_logits

            operands = (hidden.contiguous(), self.weight, self.bias, self.targets[rows])
            t = target_logits(*operands, *self.transform)
        else:
            wide = self.accumulation_dtype
            x = torch.linalg.vecdot(hidden.to(wide), self.weight[index].to(wide))
            t = self.transform.apply_(x if self.bias is None else x + self.bias[index])
            t.masked_fill_(self.unknown[rows], torch.nan)
        return t if absent is None else t.masked_fill_(absent, -torch.inf)

    def _blocks(self, logits: Tensor) -> list[slice]:
        n, vocabulary = logits.shape
        return block_slices(n, vocabulary, self.accumulation_dtype, logits.device)


def _fused_kernel_computes(statistics: str) -> bool:
    from ..kernels.linear_exp import STATISTICS

    return all(name in STATISTICS for name in statistic_names(statistics))


def _rows_of(sums: RowSums, rows: slice) -> RowSums:
    return RowSums(*(x[rows] for x in sums))


def _store(place: Tensor, block: Tensor) -> None:
    """Copies a block to its place in a tile, unless it was computed there."""
    if block.data_ptr() != place.data_ptr():
        place.copy_(block)


class GradientSum:
    """The gradient of a parameter: `scale * sum(tile.T @ rows)` over tiles, in a wide dtype.

    Args:
        out: [V, ...] memory for the gradient.
        dtype: the dtype of the sum. A sum in another dtype than `out` is kept separately and
            rounded once.
        scale: a scalar tensor, or None for 1.
        accumulate: add the gradient to `out`, as to Megatron-LM's `main_grad`, instead of
            overwriting it.
    """

    def __init__(self, out: Tensor, dtype: torch.dtype, scale: Tensor | None, accumulate: bool = False) -> None:
        self.out, self.scale, self.accumulate = out, scale, accumulate
        self.separate = scale is not None or out.dtype != dtype
        self.total = torch.empty_like(out, dtype=dtype) if self.separate else out
        self.overwrite = self.separate or not accumulate  # the first product replaces what `total` holds

    def add(self, tile: Tensor, rows: Tensor) -> None:
        """Adds `tile.T @ rows` for a tile [n, V] and rows [n, ...]."""
        total, beta = self.total, 0 if self.overwrite else 1  # beta 0 also ignores uninitialized memory
        if tile.dtype != total.dtype and tile.device.type == "cuda":
            torch.addmm(total, tile.t(), rows.to(tile.dtype), beta=beta, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, tile.t().to(total.dtype), rows.to(total.dtype), beta=beta, out=total)
        self.overwrite = False

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows [n, ...], without the scale, to those of `index` [n], after all tiles.

        Rows of the same index are added in a fixed order.
        """
        self._apply_scale()
        if self.total.device.type == "cuda":  # sorts, where index_add_ uses atomics
            self.total.index_put_((index,), rows, accumulate=True)
        else:
            self.total.index_add_(0, index, rows)

    def _apply_scale(self) -> None:
        if self.scale is not None:
            self.total *= self.scale
            self.scale = None

    def finish(self) -> None:
        """Writes the gradient to `out`."""
        self._apply_scale()
        if self.separate and self.accumulate:
            self.out += self.total
        elif self.separate:
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
