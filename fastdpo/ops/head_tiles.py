"""A head cut into tiles of tokens: the logits of one tile at a time, what is read off them, and their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph as _retains_graph

from . import checks
from .devices import suits_triton
from .head_table import fused_blocks
from .logit_rows import (
    RowSums,
    Transform,
    accumulator,
    blocks,
    fold,
    gradient_tile,
    gradient_tile_again,
    kernel_tile_rows,
    level,
    logit_gradient,
    tile_rows,
)
from .token_logps import results_of, split_targets

if TYPE_CHECKING:
    from ..kernels.linear_exp import Blocks

MEMORY_BUDGET = 512 << 20  # bytes
ALIGNMENT = 16  # words: rows of a tile begin where kernels load vectors, whatever the vocabulary


class HeadCall(NamedTuple):
    """The arguments of an op over a head, checked, and what of them needs a gradient."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    transform: Transform
    statistics: str
    compute_dtype: torch.dtype
    trains_head: bool
    forms_jacobian: bool  # in the forward: hidden states alone need a gradient

    @property
    def inputs(self) -> tuple:
        """What custom ops are given first."""
        return self[:7]

    @staticmethod
    def of(
        op: str,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        logit_scale: float,
        temperature: float,
        outputs: Sequence[str],
        memory_budget: int,
    ) -> HeadCall:
        checks.require_floating(op, hidden=hidden, weight=weight, bias=bias)
        checks.require(hidden.dim() == 2, op, "hidden", "be [N, D]", list(hidden.shape))
        checks.require_whole(op, weight=weight, bias=bias)
        d = hidden.shape[1]
        matches = weight.dim() == 2 and weight.shape[0] > 0 and weight.shape[1] == d
        expected = "be [V, {}], V > 0 (a shard of FSDP or ZeRO-3? call the op inside the head module's forward)"
        checks.require(matches, op, "weight", expected, list(weight.shape), d)
        if bias is not None:
            checks.require(tuple(bias.shape) == (len(weight),), op, "bias", "be [{}]", list(bias.shape), len(weight))
        checks.require_targets(op, targets, hidden.shape[:1])
        checks.require_same_device(op, hidden=hidden, weight=weight, bias=bias, targets=targets)
        checks.require_transform(op, softcap, temperature)
        checks.require(memory_budget >= 0, op, "memory_budget", "be a number of bytes, 0 or more", memory_budget)
        statistics = checks.requested(op, outputs)

        device, grad = hidden.device.type, torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        compute_dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        trains_head = grad and (weight.requires_grad or (bias is not None and bias.requires_grad))
        forms_jacobian = grad and hidden.requires_grad and not trains_head
        transform = Transform(softcap, logit_scale, temperature)
        inputs = (hidden, weight, bias, targets, transform, statistics, compute_dtype)
        return HeadCall(*inputs, trains_head, forms_jacobian)


class Tiles(NamedTuple):
    """How the logits of a head are cut, at a time when they are not there yet."""

    rows: int  # of a tile
    columns: int  # of its memory, of which the vocabulary takes the first
    dtype: torch.dtype  # that gradient tiles are kept and multiplied in
    kernels: bool  # whether Triton's make the passes over it
    fused: Blocks | None  # of the kernel that makes the product too, where there is one for this head

    @staticmethod
    def of(weight: Tensor, compute_dtype: torch.dtype) -> Tiles:
        """For a weight [V, D] that is multiplied in a dtype."""
        vocabulary, width = weight.shape
        in_float32 = torch.float32 if compute_dtype == torch.float16 else compute_dtype
        if not suits_triton(weight.device, compute_dtype):
            rows = tile_rows(vocabulary, accumulator(compute_dtype))
            return Tiles(rows, vocabulary, in_float32, False, None)  # in which CPUs multiply faster than in float16
        columns = -(-vocabulary // ALIGNMENT) * ALIGNMENT
        fused = fused_blocks(width, compute_dtype, weight.device) if weight.stride(1) == 1 else None
        dtype = compute_dtype if fused is None else in_float32  # its tiles have no level
        return Tiles(kernel_tile_rows(columns, compute_dtype), columns, dtype, True, fused)

    def kept(self, n: int, budget: int) -> int:
        """How many tokens' gradient tiles fit in the budget: all, or whole tiles of the loop over tokens."""
        fit = budget // (self.columns * self.dtype.itemsize)
        return min(n, n if n <= fit else fit // self.rows * self.rows)

    def empty(self, rows: int, weight: Tensor) -> Tensor:
        """Memory for a tile of so many tokens. [rows, V]"""
        memory = torch.empty(rows, self.columns, dtype=self.dtype, device=weight.device)
        return memory[:, : weight.shape[0]]


def take_kept(ctx: Any) -> Tensor:
    """The gradient tiles that the forward of an `autograd.Function` left in `ctx.kept`, for its backward.

    Autograd does not save them, so that hooks on saved tensors do not move them to the host with the activations. They
    are freed when saved tensors are: by a backward that does not retain the graph.
    """
    tiles = ctx.kept
    if not (torch.compiler.is_compiling() or _retains_graph()):
        ctx.kept = None
    return tiles


class Head:
    """One call's operands, in the dtype that it computes in."""

    def __init__(
        self,
        op: str,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        transform: Transform,
    ) -> None:
        self.tiles = Tiles.of(weight, dtype)
        self.ignored, self.unknown, self.index = split_targets(op, targets, weight.shape[0])
        self.targets = targets.contiguous()
        self.hidden, self.dtype, self.transform = hidden, dtype, transform
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype).contiguous()
        self.accumulator = accumulator(dtype)
        self._scratch: dict[torch.dtype, Tensor] = {}

    def rows(self, rows: slice) -> Tensor:
        """Hidden states [n, D]; zero where the target is ignored, so that nothing of them can spread."""
        return self.hidden[rows].to(self.dtype).masked_fill(self.ignored[rows, None], 0)

    def scratch(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """A tile's worth of memory, the same every time. [n, V]"""
        if dtype not in self._scratch:
            size = min(len(self.hidden), self.tiles.rows)
            self._scratch[dtype] = self.tiles._replace(dtype=dtype).empty(size, self.weight)
        return self._scratch[dtype][: rows.stop - rows.start]

    def results(self, rows: slice, statistics: str, gradient: Tensor | None) -> list[Tensor]:
        """logps, shift, others, total and statistics of the rows [n]. Fills their gradient tile [n, V], if given."""
        h, targets = self.rows(rows), self.targets[rows]
        target_logits = self._target_logits(h, rows)
        if self.tiles.fused is not None:
            from ..kernels.linear_exp import linear_exp_fwd

            operands = (h.contiguous(), self.weight, self.bias, targets, target_logits)
            return linear_exp_fwd(*operands, *self.transform, statistics, gradient, self.tiles.fused)
        if gradient is not None and gradient.dtype == self.dtype:
            product = self._product(h, out=gradient)
        else:
            product = self._product(h, out=self.scratch(rows, self.dtype))
        if self.tiles.kernels:
            from ..kernels.token_logps import token_logps_fwd

            return token_logps_fwd(product, targets, *self.transform, statistics, target_logits, gradient)
        index, parts, narrow = self.index[rows], [], self.tiles.dtype != self.accumulator
        for block in self._blocks(product):
            z = self.transform.apply_(product[block].to(self.accumulator))
            slope = None if gradient is None else self.transform.slope(z)
            sums, exponentials = fold(z, index[block], target_logits[block], statistics)
            if gradient is not None:
                others = sums.others
                if narrow:
                    _, others, factor = level(sums.shift, others)
                    exponentials.mul_(factor[:, None])
                _put(gradient[block], gradient_tile(exponentials, index[block], others, slope))
            parts.append(sums)
        logps, shift, others, total, *extra = results_of(parts, h, self.ignored[rows], statistics)
        if narrow:
            shift, others, factor = level(shift, others)
            total *= factor
        return [logps, shift, others, total, *extra]

    def gradient_again(
        self, rows: slice, sums: Sequence[Tensor], upstream: tuple[Tensor, Tensor] | None, dtype: torch.dtype
    ) -> Tensor:
        """The rows' gradient tile [n, V], or the gradient of their logits if that of their results is given.

        `sums` are of all rows: logps, shift, others and total; `upstream` too: of log-probabilities and entropies.
        """
        h, tile = self.rows(rows), self.scratch(rows, dtype)
        of_rows = RowSums(*(x[rows] for x in sums))
        if self.tiles.fused is not None and upstream is None:
            from ..kernels.linear_exp import linear_exp_tile

            operands = (h.contiguous(), self.weight, self.bias, self.targets[rows], of_rows.shift, of_rows.others)
            linear_exp_tile(*operands, *self.transform, tile, self.tiles.fused)
            return tile
        product = self._product(h, out=self.scratch(rows, self.dtype))
        of_logps, of_entropy = (None, None) if upstream is None else (x[rows] for x in upstream)
        if self.tiles.kernels:
            from ..kernels.token_logps import token_logps_bwd, token_logps_tile

            operands = (product, self.targets[rows], of_rows)
            if upstream is None:
                token_logps_tile(tile, *operands, *self.transform)
            else:
                token_logps_bwd(tile, of_logps, of_entropy, *operands, *self.transform)
            return tile
        index = self.index[rows]
        for block in self._blocks(product):
            z = self.transform.apply_(product[block].to(self.accumulator))
            of_block = RowSums(*(x[block] for x in of_rows))
            if of_logps is None or of_entropy is None:
                gradient = gradient_tile_again(z, index[block], of_block, self.transform.slope(z))
            else:
                given = of_logps[block], of_entropy[block]
                gradient = logit_gradient(z, index[block], of_block, *given, self.transform)
            _put(tile[block], gradient)
        return tile

    def _product(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits [n, V] before their transform, rounded to the compute dtype."""
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def _target_logits(self, hidden: Tensor, rows: slice) -> Tensor:
        """The targets' transformed logits [n], never rounded below float32."""
        if self.tiles.kernels:
            from ..kernels.linear_logps import target_logits

            return target_logits(hidden.contiguous(), self.weight, self.bias, self.targets[rows], *self.transform)
        x = torch.linalg.vecdot(hidden.to(self.accumulator), self.weight[self.index[rows]].to(self.accumulator))
        t = self.transform.apply_(x if self.bias is None else x + self.bias[self.index[rows]])
        return t.masked_fill_(self.unknown[rows], torch.nan)

    def _blocks(self, product: Tensor) -> list[slice]:
        n, vocabulary = product.shape
        return blocks(n, vocabulary, self.accumulator, product.device)


def _put(place: Tensor, tile: Tensor) -> None:
    """Writes a block of a gradient tile to its place, where it may have been made already."""
    if tile.data_ptr() != place.data_ptr():
        place.copy_(tile)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b` in a wider dtype than theirs, where that can be had not rounded to theirs first."""
    if a.dtype != dtype and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """`total (+)= a @ b` in the dtype of total, a wide one, whatever that of a and b."""
    beta = 0 if first else 1  # with 0 what total holds is ignored, so nothing needs filling
    if a.dtype != total.dtype and a.device.type == "cuda":
        torch.addmm(total, a, b.to(a.dtype), beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def shares(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """By what hidden states are multiplied [N] for their product with a tile, and by what that product is afterwards.

    Upstream gradients, and nothing; but for float16 they are too small: there their shares of the largest, and that.
    """
    if dtype != torch.float16:
        return scale, None
    largest = scale.abs().amax().clamp(min=torch.finfo(scale.dtype).tiny)
    return scale / largest, largest


def empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradients that are needed; nothing for the others."""
    found = zip((hidden, weight, bias), needs, strict=True)
    contiguous = torch.contiguous_format
    return [
        torch.empty_like(x, memory_format=contiguous) if needed and x is not None else hidden.new_empty(0)
        for x, needed in found
    ]
