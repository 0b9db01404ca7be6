"""The tiles of a head: their size, dtype and kernels, and the warps of a row, which are timed.

Dimensions: V vocabulary, D hidden size.
"""

from __future__ import annotations

import operator
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...logs import warn
from ..choice import tuning
from ..choice.tuning import Candidate
from ..choice.verdicts import Kernel, Trial, disable, failure_of_candidate, works
from ..devices import accumulation_dtype, constant_while_tracing, is_capturing, memory_of, suits_triton
from . import trials
from .logit_rows import GradientSum, kernel_tile_rows, tile_rows, wide_product
from .results import LOGGED_STATISTICS, Transform

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
