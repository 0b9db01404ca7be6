"""A head in tiles of tokens: the logits of one tile at a time, their results and gradient.

Dimensions: N scored tokens, n tokens of one tile, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..devices import accumulation_dtype
from ..transform import Transform
from .formats import ROW_KERNEL, TileFormat
from .logit_rows import (
    RowSums,
    block_slices,
    gradient_tile_,
    gradient_tile_from_logits_,
    join_results,
    logit_gradient,
    normalize,
    row_slices,
    sum_block_,
)
from .targets import TileTargets, VocabularyPart, split_targets, targets_of_part

TARGET_KERNEL = "target_logits"

T = TypeVar("T")


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
        if gradient is not None and gradient.dtype == self.dtype:
            logits = self._raw_logits(h, out=gradient)
        else:
            logits = self._raw_logits(h, out=self.scratch(rows, self.dtype))

        def launch() -> list[Tensor]:
            from ...kernels.token_logps import token_logps_fwd

            outputs = (statistics, target_logits, gradient)
            return token_logps_fwd(logits, targets, *self.transform, *outputs, self.format.row_warps)

        results = self._launched(ROW_KERNEL, launch, has_warps=True)
        if results is None:
            results = self._results_in_torch(rows, h, logits, target_logits, statistics, gradient)
        return results if self.part is None else [*results, target_logits]

    def _launched(self, kernel: str, launch: Callable[[], T], has_warps: bool = False) -> T | None:
        """What the launch of a kernel returns, or None where PyTorch computes in its place.

        If it fails, the format changes to that which replaces it.
        """
        while self.format.triton:
            try:
                return launch()
            except torch.OutOfMemoryError:  # no fault of the kernel
                raise
            except Exception as error:  # it may not compile, fit the device, or launch
                self.format = self.format.replaced(self.weight, error, kernel, has_warps)
        return None

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
        logits = self._raw_logits(h, out=self.scratch(rows, self.dtype))

        def launch() -> Tensor:
            from ...kernels.token_logps import token_logps_tile

            token_logps_tile(tile, logits, self.targets[rows], tile_sums, *self.transform)
            return tile

        if self._launched(ROW_KERNEL, launch) is not None:
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

        def launch() -> Tensor:
            from ...kernels.token_logps import token_logps_bwd

            upstream = grad_logps, grad_entropy
            token_logps_bwd(tile, *upstream, logits, self.targets[rows], sums, *self.transform, mean_offset)
            return tile

        if self._launched(ROW_KERNEL, launch) is not None:
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

        def launch() -> Tensor:
            from ...kernels.linear_logps import target_logits

            operands = (hidden.contiguous(), self.weight, self.bias, self.targets[rows])
            return target_logits(*operands, *self.transform)

        t = self._launched(TARGET_KERNEL, launch)
        if t is None:
            wide = self.accumulation_dtype
            x = torch.linalg.vecdot(hidden.to(wide), self.weight[index].to(wide))
            t = self.transform.apply_(x if self.bias is None else x + self.bias[index])
            t.masked_fill_(self.unknown[rows], torch.nan)
        return t if absent is None else t.masked_fill_(absent, -torch.inf)

    def _blocks(self, logits: Tensor) -> list[slice]:
        n, vocabulary = logits.shape
        return block_slices(n, vocabulary, self.accumulation_dtype, logits.device)


def _rows_of(sums: RowSums, rows: slice) -> RowSums:
    return RowSums(*(x[rows] for x in sums))


def _store(place: Tensor, block: Tensor) -> None:
    """Copies a block to its place in a tile, unless it was computed there."""
    if block.data_ptr() != place.data_ptr():
        place.copy_(block)
