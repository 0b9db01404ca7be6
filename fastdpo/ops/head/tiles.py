"""A head in tiles of tokens: the logits of one tile at a time, their results and gradient.

Dimensions: N scored tokens, n tokens of one tile, V vocabulary, D hidden size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..choice import tuning
from ..choice.tuning import Candidate
from ..choice.verdicts import Kernel, Trial, failure_of_candidate, works
from ..devices import accumulation_dtype, constant_while_tracing, memory_of, suits_triton
from ..transform import Transform
from . import trials
from .gradient_sums import GradientSum, wide_product
from .logit_rows import (
    RowSums,
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
from .targets import TileTargets, VocabularyPart, split_targets, targets_of_part

ALIGNMENT = 16  # elements: rows of a tile start where kernels load vectors, whatever the size of the vocabulary
LEAST_TUNED = 1 << 24  # elements of the weight: smaller heads take little time
DEFAULT_WARPS = "8 warps"
WHOLE_MULTIPROCESSOR = 32
"""Warps that occupy a multiprocessor of NVIDIA's at 64 registers a thread. The rows that the device works on are then
so few that most vocabularies' fit its L2 cache, from which the second pass reads them."""
TUNED_STATISTICS = "entropy,mean_logits,is_top1"  # those that TRL logs


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
        row_warps: warps of the kernel that works on a row of a tile, or None for its default.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    triton: bool
    row_warps: int | None = None

    @staticmethod
    def of(weight: Tensor, compute_dtype: torch.dtype, *, is_part: bool = False) -> TileFormat:
        """The format for a weight [V, D] that is multiplied in `compute_dtype`.

        One that has a part of the vocabulary is not tuned.
        """
        vocabulary, width = weight.shape
        float16_widened = torch.float32 if compute_dtype == torch.float16 else compute_dtype
        if not _takes_kernels(weight.device, compute_dtype):  # CPUs multiply faster in float32 than in float16
            rows = tile_rows(vocabulary, accumulation_dtype(compute_dtype))
            return TileFormat(rows, vocabulary, float16_widened, triton=False)
        columns = -(-vocabulary // ALIGNMENT) * ALIGNMENT
        rows = kernel_tile_rows(columns, compute_dtype, memory_of(weight.device))
        format = TileFormat(rows, columns, compute_dtype, triton=True)
        if is_part or not tuning.is_on(weight.device) or vocabulary * width < LEAST_TUNED:
            return format
        return format._replace(row_warps=_tuned_warps(format, weight))

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
    kernels = trials.OF_LOGITS.items()
    return suits_triton(device, dtype) and all(works(Kernel(name, device, dtype), trial) for name, trial in kernels)


@constant_while_tracing
def _takes_row_kernel(device: torch.device, dtype: torch.dtype, warps: int) -> bool:
    return works(*_row_kernel_and_trial(device, dtype, warps))


def _row_kernel_and_trial(device: torch.device, dtype: torch.dtype, warps: int) -> tuple[Kernel, Trial]:
    trial = partial(trials.token_logps, warps=warps)
    return Kernel("token_logps", device, dtype, (f"{warps} warps",)), trial


def _tuned_warps(format: TileFormat, weight: Tensor) -> int | None:
    """The number of warps for a row that is fastest for a weight [V, D], or None for the default."""
    device, dtype = weight.device, format.dtype
    call = device, dtype, operator.index(weight.shape[0]), operator.index(weight.shape[1])
    if torch.compiler.is_compiling():
        warps = _settled_warps(*call)
    else:

        def candidates() -> list[Candidate]:
            return [
                Candidate(
                    name,
                    run=partial(_run_tiles, format._replace(row_warps=warps), weight),
                    failure=partial(_row_kernel_failure, device, dtype, warps),
                )
                for name, warps in _row_warps().items()
            ]

        warps = _row_warps()[tuning.choose(_tuned_call(*call), DEFAULT_WARPS, candidates)]
    return warps if warps is None or _takes_row_kernel(device, dtype, warps) else None


@constant_while_tracing
def _settled_warps(device: torch.device, dtype: torch.dtype, vocabulary: int, width: int) -> int | None:
    """As `_tuned_warps`, where nothing can be run."""
    choices = _row_warps()
    return choices[tuning.settled(_tuned_call(device, dtype, vocabulary, width), DEFAULT_WARPS, [*choices])]


def _row_warps() -> dict[str, int | None]:
    """By name, the numbers of warps for a row, one of which may be faster."""
    whole = {} if torch.version.hip is not None else {f"{WHOLE_MULTIPROCESSOR} warps": WHOLE_MULTIPROCESSOR}
    return {DEFAULT_WARPS: None, **whole}


def _tuned_call(device: torch.device, dtype: torch.dtype, vocabulary: int, width: int) -> Kernel:
    return Kernel("linear_logps", device, dtype, (f"V {vocabulary}", f"D {width}"))


def _row_kernel_failure(device: torch.device, dtype: torch.dtype, warps: int | None) -> str | None:
    if warps is None:
        return None  # has been tried before
    return failure_of_candidate(*_row_kernel_and_trial(device, dtype, warps))


def _run_tiles(format: TileFormat, weight: Tensor) -> None:
    """Runs forward and backward of a head on the tokens of a tile, or V if there are less. Rows of
    the weight stand in for hidden states.
    """
    trained, weight = weight.requires_grad, weight.detach()
    hidden = weight[: format.rows]
    targets = torch.arange(len(hidden), device=weight.device)
    call = HeadCall(hidden, weight, None, targets, None, 1.0, 1.0, format.dtype)
    head = Head("linear_logps", call, format=format)
    wide, tile_weight = head.accumulation_dtype, head.weight.to(format.dtype)
    grad_hidden = torch.empty_like(hidden, dtype=wide)
    grad_weight = GradientSum(torch.empty_like(weight, dtype=wide), wide, None) if trained else None
    for rows in head.tiles():
        tile = head.scratch(rows, format.dtype)
        head.results(rows, TUNED_STATISTICS, tile)
        wide_product(tile, tile_weight, grad_hidden[rows])
        if grad_weight is not None:
            grad_weight.add(tile, head.hidden_rows(rows))


class Head:
    """One call of a head, in its compute dtype, and the work on one tile of its tokens.

    With a `VocabularyPart`, the weight has that part's rows. Results and gradients are those of the
    part's distribution alone, to which a target outside of it adds nothing.
    """

    def __init__(
        self, op: str, call: HeadCall, part: VocabularyPart | None = None, format: TileFormat | None = None
    ) -> None:
        dtype = self.dtype = call.compute_dtype
        self.format = TileFormat.of(call.weight, dtype, is_part=part is not None) if format is None else format
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
        if self.format.triton:
            from ...kernels.token_logps import NUM_WARPS, token_logps_fwd

            outputs = (statistics, target_logits, gradient)
            results = token_logps_fwd(logits, targets, *self.transform, *outputs, self.format.row_warps or NUM_WARPS)
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
        logits = self._raw_logits(h, out=self.scratch(rows, self.dtype))
        if self.format.triton:
            from ...kernels.token_logps import token_logps_tile

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
            from ...kernels.token_logps import token_logps_bwd

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
            from ...kernels.linear_logps import target_logits

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


def _rows_of(sums: RowSums, rows: slice) -> RowSums:
    return RowSums(*(x[rows] for x in sums))


def _store(place: Tensor, block: Tensor) -> None:
    """Copies a block to its place in a tile, unless it was computed there."""
    if block.data_ptr() != place.data_ptr():
        place.copy_(block)
