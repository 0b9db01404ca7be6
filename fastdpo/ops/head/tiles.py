"""A head in tiles of tokens: their format, the kernels that make the passes over them, and the logits of one tile at
a time, their results and gradient.

Dimensions: N scored tokens, n tokens of one tile, V vocabulary, D hidden size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...logs import warn
from ..choice import tuning
from ..choice.tuning import Candidate
from ..choice.verdicts import Kernel, Trial, disable, failure_of_candidate, works
from ..devices import accumulation_dtype, constant_while_tracing, is_capturing, memory_of, suits_triton
from . import trials
from .logit_rows import (
    GradientInputs,
    GradientSum,
    block_slices,
    gradient_tile_,
    join_results,
    kernel_tile_rows,
    logit_gradient,
    normalize,
    row_slices,
    sum_block_,
    tile_rows,
    wide_product,
)
from .results import LOGGED_STATISTICS, Targets, Transform

OP = "linear_logps"
ALIGNMENT = 16  # elements: rows of a tile start where kernels load vectors, whatever the size of the vocabulary
LEAST_TUNED = 1 << 24  # elements of the weight: smaller heads take little time
ROW_KERNEL = "token_logps"
DEFAULT_WARPS = "8 warps"
WHOLE_MULTIPROCESSOR = 32
"""Warps that occupy a multiprocessor of NVIDIA's at 64 registers a thread. The rows that the device works on are then
so few that most vocabularies' fit its L2 cache, from which the second pass reads them."""
ROW_WARPS: dict[str, int | None] = {DEFAULT_WARPS: None}
"""By name, the numbers of warps for a row, one of which may be faster."""
if torch.version.hip is None:
    ROW_WARPS[f"{WHOLE_MULTIPROCESSOR} warps"] = WHOLE_MULTIPROCESSOR
TARGET_KERNEL = "target_logits"

T = TypeVar("T")

HEAD = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, float? softcap, float logit_scale, float temperature, "
    "ScalarType compute_dtype"
)
"""The first fields of a `HeadCall`, as custom ops declare them."""


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
    def of(weight: Tensor, compute_dtype: torch.dtype) -> TileFormat:
        """The format for a weight [V, D] that is multiplied in `compute_dtype`."""
        vocabulary, width = weight.shape
        float16_widened = torch.float32 if compute_dtype == torch.float16 else compute_dtype
        if not _takes_kernels(weight.device, compute_dtype):  # CPUs multiply faster in float32 than in float16
            rows = tile_rows(vocabulary, accumulation_dtype(compute_dtype))
            return TileFormat(rows, vocabulary, float16_widened, triton=False)
        columns = -(-vocabulary // ALIGNMENT) * ALIGNMENT
        rows = kernel_tile_rows(columns, compute_dtype, memory_of(weight.device))
        format = TileFormat(rows, columns, compute_dtype, triton=True)
        if not tuning.is_on(weight.device) or vocabulary * width < LEAST_TUNED:
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

    def replaced(self, weight: Tensor, error: Exception, kernel: str, has_warps: bool) -> TileFormat:
        """The format with which to repeat a launch that has failed, after one warning.

        A kernel that runs with different numbers of warps runs with the next one that was timed for this weight.
        Otherwise the kernel is disabled, and PyTorch makes the passes for the rest of the process.

        Args:
            weight: [V, D].
            error: what the launch has raised.
            kernel: the name under which the kernel is tried.
            has_warps: whether `row_warps` are those of the kernel.

        Raises:
            NotFused: PyTorch must make the passes, and `FASTDPO_STRICT=1`.
            Exception: the error, while a CUDA graph is captured.
        """
        if is_capturing(weight.device):
            raise error
        reason = f"{type(error).__name__}: {error}"
        if has_warps:
            call = _tuned_call(weight.device, self.dtype, *weight.shape)
            failed = next(name for name, warps in ROW_WARPS.items() if warps == self.row_warps)
            tuning.withdraw(call, failed, reason)
            for name in tuning.timed(call):
                warn(f"{OP}: the kernel with {failed} has failed and is replaced by that with {name}: {reason}")
                return self._replace(row_warps=ROW_WARPS[name])
        disable(Kernel(kernel, weight.device, self.dtype), reason)
        return self._replace(triton=False)


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
    """One call of a head, in its compute dtype, and the work on one tile of its tokens."""

    def __init__(self, call: HeadCall) -> None:
        dtype = self.dtype = call.compute_dtype
        self.format = TileFormat.of(call.weight, dtype)
        self.targets = Targets.of(OP, call.targets, len(call.weight))
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
        return self.hidden[rows].to(self.dtype).masked_fill(self.targets.ignored[rows, None], 0)

    def scratch(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Memory for one tile [n, V]. Every call with the same dtype returns the same memory."""
        if dtype not in self._scratch:
            size = min(len(self.hidden), self.format.rows)
            self._scratch[dtype] = self.format._replace(dtype=dtype).allocate(size, self.weight)
        return self._scratch[dtype][: rows.stop - rows.start]

    def results(self, rows: slice, statistics: str, gradient: Tensor | None) -> list[Tensor]:
        """logps, shift, others, total and statistics of one tile, [n] each.

        Writes the gradient tile to `gradient` [n, V] if it is given.
        """
        h, targets = self.hidden_rows(rows), self.targets.of_rows(rows)
        target_logits = self._target_logits(h, targets)
        if gradient is not None and gradient.dtype == self.dtype:
            logits = self._raw_logits(h, out=gradient)
        else:
            logits = self._raw_logits(h, out=self.scratch(rows, self.dtype))

        def launch() -> list[Tensor]:
            from ...kernels.token_logps import token_logps_fwd

            outputs = (statistics, target_logits, gradient)
            return token_logps_fwd(logits, targets.ids, *self.transform, *outputs, self.format.row_warps)

        results = self._launched(ROW_KERNEL, launch, has_warps=True)
        if results is None:
            results = self._results_in_torch(logits, targets, target_logits, statistics, gradient)
        return results

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
        self, logits: Tensor, targets: Targets, target_logits: Tensor, statistics: str, gradient: Tensor | None
    ) -> list[Tensor]:
        parts, narrow = [], self.format.dtype != self.accumulation_dtype
        for block in block_slices(logits, self.accumulation_dtype):
            z = self.transform.apply_(logits[block].to(self.accumulation_dtype))
            slope = None if gradient is None else self.transform.slope(z)
            of_block = targets.of_rows(block)
            sums, exponentials = sum_block_(z, of_block, target_logits[block], statistics)
            if gradient is not None:
                others = sums.others
                if narrow:
                    _, others, factor = normalize(sums.shift, others)
                    exponentials.mul_(factor[:, None])
                _store(gradient[block], gradient_tile_(exponentials, of_block, others, slope))
            parts.append(sums)
        logps, shift, others, total, *extra = join_results(parts, logits, targets.ignored, statistics)
        if narrow:
            shift, others, factor = normalize(shift, others)
            total *= factor
        return [logps, shift, others, total, *extra]

    def gradients(self, kept: Tensor, inputs: GradientInputs, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """The gradient tiles of all tokens in `dtype`, with their rows: first those in `kept`, then recomputed.

        Kept tiles come all at once if they can be multiplied without a wider copy. With a gradient of the
        entropy, the gradient of the raw logits takes the place of each tile, and all of them are recomputed.
        """
        keep = len(kept) if inputs.grad_entropy is None else 0
        if keep and (dtype == self.accumulation_dtype or self.format.triton):
            yield slice(0, keep), kept
        else:
            for rows in row_slices(keep, self.format.rows):
                yield rows, kept[rows]
        for rows in self.tiles(keep):
            yield rows, self._gradient(rows, inputs.of_rows(rows), dtype)

    def _gradient(self, rows: slice, inputs: GradientInputs, dtype: torch.dtype) -> Tensor:
        tile, targets = self.scratch(rows, dtype), self.targets.of_rows(rows)
        logits = self._raw_logits(self.hidden_rows(rows), out=self.scratch(rows, self.dtype))

        def launch() -> Tensor:
            from ...kernels.token_logps import token_logps_bwd

            *sums, grad_logps, grad_entropy = inputs
            token_logps_bwd(tile, grad_logps, grad_entropy, logits, targets.ids, sums, *self.transform)
            return tile

        if self._launched(ROW_KERNEL, launch) is None:
            for block in block_slices(logits, self.accumulation_dtype):
                z = self.transform.apply_(logits[block].to(self.accumulation_dtype))
                gradient = logit_gradient(z, targets.of_rows(block), inputs.of_rows(block), self.transform)
                _store(tile[block], gradient)
        return tile

    def _raw_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits [n, V] before their transform, rounded to the compute dtype."""
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def _target_logits(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Transformed logits [n] of the targets, at least float32, NaN for unknown targets."""

        def launch() -> Tensor:
            from ...kernels.linear_logps import target_logits

            operands = (hidden.contiguous(), self.weight, self.bias, targets.ids)
            return target_logits(*operands, *self.transform)

        t = self._launched(TARGET_KERNEL, launch)
        if t is None:
            wide = self.accumulation_dtype
            x = torch.linalg.vecdot(hidden.to(wide), self.weight[targets.index].to(wide))
            t = self.transform.apply_(x if self.bias is None else x + self.bias[targets.index])
            t.masked_fill_(targets.unknown, torch.nan)
        return t


def _store(place: Tensor, block: Tensor) -> None:
    """Copies a block to its place in a tile, unless it was computed there."""
    if block.data_ptr() != place.data_ptr():
        place.copy_(block)


@constant_while_tracing
def _takes_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    kernels = trials.OF_LOGITS.items()
    return suits_triton(device, dtype) and all(works(Kernel(name, device, dtype), trial) for name, trial in kernels)


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
                    run=partial(_run_tile, format._replace(row_warps=warps), weight),
                    failure=partial(failure_of_candidate, *_row_kernel_and_trial(device, dtype, warps)),
                )
                for name, warps in ROW_WARPS.items()
            ]

        warps = ROW_WARPS[tuning.choose(_tuned_call(*call), DEFAULT_WARPS, candidates)]
    return warps if _takes_row_kernel(device, dtype, warps) else None


@constant_while_tracing
def _settled_warps(device: torch.device, dtype: torch.dtype, vocabulary: int, width: int) -> int | None:
    """As `_tuned_warps`, where nothing can be run."""
    return ROW_WARPS[tuning.settled(_tuned_call(device, dtype, vocabulary, width), DEFAULT_WARPS, [*ROW_WARPS])]


@lru_cache
def _tuned_call(device: torch.device, dtype: torch.dtype, vocabulary: int, width: int) -> Kernel:
    return Kernel(OP, device, dtype, (f"V {vocabulary}", f"D {width}"))


def _row_kernel_and_trial(device: torch.device, dtype: torch.dtype, warps: int | None) -> tuple[Kernel, Trial]:
    features = () if warps is None else (f"{warps} warps",)
    return Kernel(ROW_KERNEL, device, dtype, features), partial(trials.token_logps, warps=warps)


@constant_while_tracing
def _takes_row_kernel(device: torch.device, dtype: torch.dtype, warps: int | None) -> bool:
    return works(*_row_kernel_and_trial(device, dtype, warps))


def _run_tile(format: TileFormat, weight: Tensor) -> None:
    """Runs forward and backward of a head on the tokens of a tile, or V if there are less. Rows of
    the weight stand in for hidden states.
    """
    from ...kernels.linear_logps import target_logits
    from ...kernels.token_logps import token_logps_fwd

    trained, transform, wide = weight.requires_grad, Transform(None, 1.0, 1.0), accumulation_dtype(format.dtype)
    weight = weight.detach().to(format.dtype)
    hidden = weight[: format.rows].contiguous()
    targets = torch.arange(len(hidden), device=weight.device)
    tile = torch.mm(hidden, weight.t(), out=format.allocate(len(hidden), weight))
    of_targets = target_logits(hidden, weight, None, targets, *transform)
    token_logps_fwd(tile, targets, *transform, ",".join(LOGGED_STATISTICS), of_targets, tile, format.row_warps)
    wide_product(tile, weight, torch.empty_like(hidden, dtype=wide))
    if trained:
        GradientSum(torch.empty_like(weight, dtype=wide), wide, None).add(tile, hidden)
