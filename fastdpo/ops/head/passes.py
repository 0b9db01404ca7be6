"""One call of a head: the format of its tiles, the work on one of them, and its two passes over all.

Dimensions: N scored tokens, n tokens of one tile, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...packing import IGNORE_INDEX
from ..choice.verdicts import Kernel, Trial, disable, works
from ..devices import accumulation_dtype, constant_while_tracing, is_capturing, is_host, memory_of, suits_triton
from . import row_warps, trials
from .logit_rows import (
    GradientInputs,
    GradientSum,
    block_slices,
    empty_gradients,
    kernel_tile_rows,
    logit_gradient,
    results_in_torch,
    row_slices,
    split_row_scale,
    store,
    tile_rows,
    upstream_scale,
    wide_product,
)
from .results import LOGGED_STATISTICS, STATISTICS, Targets, Transform, empty_results, statistic_names
from .row_warps import OP, ROW_KERNEL
from .token_logps import takes_kernels

T = TypeVar("T")

ALIGNMENT = 16  # elements: rows of a tile start where kernels load vectors, whatever the size of the vocabulary
TARGET_KERNEL = "target_logits"
NO_TRANSFORM = Transform(None, 1.0, 1.0)


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
    def of(
        weight: Tensor, compute_dtype: torch.dtype, transform: Transform = NO_TRANSFORM, biased: bool = False
    ) -> TileFormat:
        """The format for a weight [V, D] that is multiplied in `compute_dtype`."""
        vocabulary = weight.shape[0]
        if not _takes_kernels(weight.device, compute_dtype, transform.kind, biased):
            # CPUs multiply faster in float32 than in float16
            float16_widened = torch.float32 if compute_dtype == torch.float16 else compute_dtype
            rows = tile_rows(vocabulary, accumulation_dtype(compute_dtype))
            return TileFormat(rows, vocabulary, float16_widened, triton=False)
        columns = -(-vocabulary // ALIGNMENT) * ALIGNMENT
        rows = kernel_tile_rows(columns, compute_dtype, memory_of(weight.device))
        format = TileFormat(rows, columns, compute_dtype, triton=True)
        run = partial(_run_tile, format, weight, transform)
        return format._replace(row_warps=row_warps.fastest(weight, compute_dtype, transform.kind, run))

    def rows_within(self, n: int, budget: int) -> int:
        """How many of n tokens have gradient tiles that fit in `budget` bytes.

        All of them, or those of whole tiles.
        """
        fitting = budget // self.bytes_of(1)
        return min(n, n if n <= fitting else fitting // self.rows * self.rows)

    def bytes_of(self, rows: int) -> int:
        """The bytes of the gradient tiles of so many tokens."""
        return rows * self.columns * self.dtype.itemsize

    def allocate(self, rows: int, weight: Tensor) -> Tensor:
        """Uninitialized memory [rows, V] on the device of the weight."""
        memory = torch.empty(rows, self.columns, dtype=self.dtype, device=weight.device)
        if is_host(weight.device):  # in the interpreter: products by Intel's AMX also read what is behind the columns
            memory[:, weight.shape[0] :] = 0
        return memory[:, : weight.shape[0]]

    def replaced(self, weight: Tensor, error: Exception, kernel: Kernel, has_warps: bool) -> TileFormat:
        """The format with which to repeat a launch that has failed, after one warning.

        A kernel that runs with different numbers of warps runs with the next one that was timed for this weight.
        Otherwise the kernel is disabled, and PyTorch makes the passes for the rest of the process.

        Args:
            weight: [V, D].
            error: what the launch has raised.
            kernel: as it is tried.
            has_warps: whether `row_warps` are those of the kernel.

        Raises:
            NotFused: PyTorch must make the passes, and `FASTDPO_STRICT=1`.
            Exception: the error, while a CUDA graph is captured.
        """
        if is_capturing(weight.device):
            raise error
        reason = f"{type(error).__name__}: {error}"
        others = row_warps.others(self.row_warps, weight, self.dtype, reason) if has_warps else []
        if others:
            return self._replace(row_warps=others[0])
        disable(kernel, reason)
        return self._replace(triton=False)


def _tried(device: torch.device, dtype: torch.dtype, kind: str, biased: bool) -> dict[str, tuple[Kernel, Trial]]:
    """The kernels that every head with a kind of transform runs, and their trials."""
    features = (kind, "bias") if biased else (kind,)
    of_targets = Kernel(TARGET_KERNEL, device, dtype, features), partial(trials.target_logits, kind=kind, biased=biased)
    return {ROW_KERNEL: row_warps.tried(device, dtype, kind), TARGET_KERNEL: of_targets}


@constant_while_tracing
def _takes_kernels(device: torch.device, dtype: torch.dtype, kind: str, biased: bool) -> bool:
    return suits_triton(device, dtype) and all(works(*x) for x in _tried(device, dtype, kind, biased).values())


def _run_tile(format: TileFormat, weight: Tensor, transform: Transform, warps: int | None) -> None:
    """Runs forward and backward of a head on the tokens of a tile, or V if there are less. Rows of
    the weight stand in for hidden states.
    """
    from ...kernels.linear_logps import target_logits
    from ...kernels.token_logps import token_logps_fwd

    trained, wide = weight.requires_grad, accumulation_dtype(format.dtype)
    weight = weight.detach().to(format.dtype)
    hidden = weight[: format.rows].contiguous()
    targets = torch.arange(len(hidden), device=weight.device)
    tile = torch.mm(hidden, weight.t(), out=format.allocate(len(hidden), weight))
    of_targets = target_logits(hidden, weight, None, targets, *transform)
    token_logps_fwd(tile, targets, *transform, ",".join(LOGGED_STATISTICS), of_targets, tile, warps)
    wide_product(tile, weight, torch.empty_like(hidden, dtype=wide))
    if trained:
        GradientSum(torch.empty_like(weight, dtype=wide), wide, None).add(tile, hidden)


HEAD = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, float? softcap, float logit_scale, float temperature, "
    "ScalarType compute_dtype"
)
"""The arguments of a `Head`, as custom ops declare them, which take them flat."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Those of hidden, weight and bias."""


class Head:
    """One call of a head, in its compute dtype: the work on one tile of its tokens, and the passes over all tiles.

    Args:
        call: the arguments that `HEAD` names.
    """

    def __init__(self, *call: Any) -> None:
        self.hidden, weight, bias, self._ids, *transform, self.dtype = call
        self._parameters: tuple[Tensor, Tensor | None] = weight, bias
        self.transform = Transform(*transform)
        self.accumulation_dtype = accumulation_dtype(self.dtype)
        self._scratch: dict[torch.dtype, Tensor] = {}

    @cached_property
    def format(self) -> TileFormat:
        weight, bias = self._parameters
        return TileFormat.of(weight, self.dtype, self.transform, bias is not None)

    @cached_property
    def targets(self) -> Targets:
        return Targets.of(OP, self._ids, len(self._parameters[0]))

    @cached_property
    def weight(self) -> Tensor:
        return self._parameters[0].to(self.dtype)

    @cached_property
    def bias(self) -> Tensor | None:
        _, bias = self._parameters
        return None if bias is None else bias.to(self.dtype).contiguous()

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

            names = statistic_names(statistics)  # the kernel that was tried computes some that are not requested
            computed = LOGGED_STATISTICS if {*names} <= {*LOGGED_STATISTICS} else STATISTICS
            outputs = (",".join(computed), target_logits, gradient)
            found = token_logps_fwd(logits, targets.ids, *self.transform, *outputs, self.format.row_warps)
            return found[:4] + [x for name, x in zip(computed, found[4:], strict=True) if name in names]

        results = self._launched(ROW_KERNEL, launch, has_warps=True)
        if results is None:
            narrow = self.format.dtype != self.accumulation_dtype
            results = results_in_torch(logits, targets, statistics, self.transform, target_logits, gradient, narrow)
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
                tried, _ = _tried(self.weight.device, self.dtype, self.transform.kind, self.bias is not None)[kernel]
                self.format = self.format.replaced(self.weight, error, tried, has_warps)
        return None

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
        for rows in row_slices(len(self.hidden), self.format.rows, keep):
            yield rows, self._gradient(rows, inputs.of_rows(rows), dtype)

    def _gradient(self, rows: slice, inputs: GradientInputs, dtype: torch.dtype) -> Tensor:
        tile, targets = self.scratch(rows, dtype), self.targets.of_rows(rows)
        logits = self._raw_logits(self.hidden_rows(rows), out=self.scratch(rows, self.dtype))

        def launch() -> Tensor:
            from ...kernels.token_logps import token_logps_bwd

            *sums, grad_logps, grad_entropy = inputs
            token_logps_bwd(tile, grad_logps, grad_entropy, logits, targets.ids, sums, *self.transform)
            return tile

        tried = inputs.grad_entropy is None or takes_kernels(logits)
        if not tried or self._launched(ROW_KERNEL, launch) is None:
            for block in block_slices(logits, self.accumulation_dtype):
                z = self.transform.apply_(logits[block].to(self.accumulation_dtype))
                gradient = logit_gradient(z, targets.of_rows(block), inputs.of_rows(block), self.transform)
                store(tile[block], gradient)
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

    def empty_outputs(self, statistics: str, keep: int, form_jacobian: bool) -> list[Tensor]:
        """Uninitialized outputs of `forward`."""
        kept, (n, d) = self.format.allocate(keep, self._parameters[0]), self.hidden.shape
        jacobian = self.hidden.new_empty(n if form_jacobian else 0, d, dtype=self.accumulation_dtype)
        return [kept, jacobian, *empty_results(self.hidden, statistics)]

    def forward(self, statistics: str, keep: int, form_jacobian: bool) -> list[Tensor]:
        """Results of a head, and what its backward needs.

        Returns:
            Gradient tiles of the first `keep` tokens [keep, V]; the jacobian `d logp / d hidden`
            [N, D], or [0, D] if not `form_jacobian`; then what `results` returns, [N] each.
        """
        with torch.autocast(self.hidden.device.type, enabled=False):
            kept, jacobian, *results = self.empty_outputs(statistics, keep, form_jacobian)
            tile_weight = self.weight.to(kept.dtype) if form_jacobian else self.weight  # widened for float16 on a CPU
            tiles: list[list[Tensor]] = []
            for rows in row_slices(len(self.hidden), self.format.rows):
                gradient = None
                if rows.stop <= keep:
                    gradient = kept[rows]
                elif form_jacobian:
                    gradient = self.scratch(rows, kept.dtype)
                tiles.append(self.results(rows, statistics, gradient))
                if form_jacobian and gradient is not None:
                    wide_product(gradient, tile_weight, jacobian[rows])
            if tiles:
                results = tiles[0] if len(tiles) == 1 else [torch.cat(x) for x in zip(*tiles, strict=True)]
            return [kept, jacobian, *results]

    def backward(self, inputs: GradientInputs, kept: Tensor, jacobian: Tensor, needs: Sequence[bool]) -> Gradients:
        """Gradients of hidden, weight and bias, without elements where not needed."""
        grads = empty_gradients(self.hidden, *self._parameters, needs)
        wide = self.accumulation_dtype
        with torch.autocast(self.hidden.device.type, enabled=False):
            ignored = self._ids == IGNORE_INDEX
            grad_logps, grad_entropy = (
                None if grad is None else grad.to(wide).masked_fill(ignored, 0)
                for grad in (inputs.grad_logps, inputs.grad_entropy)
            )
            if grad_logps is None:
                grad_logps = torch.zeros_like(inputs.total)
            inputs = inputs._replace(grad_logps=grad_logps, grad_entropy=grad_entropy)
            scale = upstream_scale(grad_logps, inputs.total, self.transform)  # [N]
            if not len(self.hidden):
                for grad in grads:
                    grad.zero_()
            elif len(jacobian) and grad_entropy is None:
                torch.mul(jacobian, scale[:, None], out=grads[0])
            else:
                self._sum_tiles(inputs, scale, kept, needs, grads)
        return grads

    def _sum_tiles(
        self, inputs: GradientInputs, scale: Tensor, kept: Tensor, needs: Sequence[bool], grads: Gradients
    ) -> None:
        """Writes the gradients from those of all tiles, kept or recomputed."""
        (needs_hidden, needs_weight, needs_bias), (grad_hidden, grad_weight, grad_bias) = needs, grads
        dtype, wide = kept.dtype, self.accumulation_dtype
        if inputs.grad_entropy is None:
            inputs = inputs._replace(grad_logps=None)
        else:  # scaled already, by upstream gradients that may be too small for float16
            dtype, scale = wide if dtype == torch.float16 else dtype, torch.ones_like(scale)
        row_scale, common_scale = split_row_scale(scale, dtype)
        tile_weight = self.weight.to(dtype) if needs_hidden else self.weight
        weight_sum = GradientSum(grad_weight, wide, common_scale) if needs_weight else None
        bias_sum = GradientSum(grad_bias[:, None], wide, common_scale) if needs_bias else None
        for rows, tile in self.gradients(kept, inputs, dtype):
            if needs_hidden:
                place = grad_hidden[rows]
                product = place if place.dtype == wide else torch.empty_like(place, dtype=wide)
                torch.mul(wide_product(tile, tile_weight, product), scale[rows, None], out=place)
            if weight_sum is not None:
                scaled_rows = self.hidden_rows(rows).to(wide) * row_scale[rows, None]
                weight_sum.add(tile, scaled_rows.to(dtype))
            if bias_sum is not None:
                bias_sum.add(tile, row_scale[rows, None])
        for gradient_sum in (weight_sum, bias_sum):
            if gradient_sum is not None:
                gradient_sum.finish()
