"""Log-probabilities straight from hidden states and the head's weight: the `[N, V]` logits are never stored whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..packing import IGNORE_INDEX
from . import checks
from .devices import suits_triton
from .head_table import fused_blocks
from .logit_rows import (
    RowSums,
    Transform,
    accumulator,
    blocks,
    cuts,
    fold,
    gradient_tile,
    gradient_tile_again,
    kernel_tile_rows,
    level,
    logit_gradient,
    row_scale,
    tile_rows,
)
from .results import TokenLogps
from .token_logps import empty_results, named_results, results_of, split_targets

OP = "linear_logps"
MEMORY_BUDGET = 512 << 20  # bytes
ALIGNMENT = 16  # words: rows of a tile begin where kernels load vectors, whatever the vocabulary


class _Tiles(NamedTuple):
    """How the logits of a head are cut, at a time when they are not there yet."""

    rows: int  # of a tile
    columns: int  # of its memory, of which the vocabulary takes the first
    kernels: bool  # whether Triton's make the passes over it
    dtype: torch.dtype  # that gradient tiles are kept and multiplied in

    @staticmethod
    def of(vocabulary: int, compute_dtype: torch.dtype, device: torch.device) -> _Tiles:
        if not suits_triton(device, compute_dtype):
            dtype = torch.float32 if compute_dtype == torch.float16 else compute_dtype  # CPUs multiply that fast
            return _Tiles(tile_rows(vocabulary, accumulator(compute_dtype)), vocabulary, False, dtype)
        columns = -(-vocabulary // ALIGNMENT) * ALIGNMENT
        return _Tiles(kernel_tile_rows(columns, compute_dtype), columns, True, compute_dtype)

    def kept(self, n: int, budget: int) -> int:
        """How many tokens' gradient tiles fit in the budget: all, or whole tiles of the loop over tokens."""
        fit = budget // (self.columns * self.dtype.itemsize)
        return min(n, n if n <= fit else fit // self.rows * self.rows)


class _Head:
    """One call's operands, in the dtype that it computes in."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dtype: torch.dtype):
        self.tiles = _Tiles.of(len(weight), dtype, weight.device)
        self.ignored, self.index = split_targets(OP, targets, weight.shape[0])
        self.targets = targets.contiguous()
        self.hidden, self.dtype = hidden, dtype
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype).contiguous()
        self.accumulator = accumulator(dtype)
        suits = self.tiles.kernels and self.weight.stride(1) == 1
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.fused = fused_blocks(weight.shape[1], dtype, weight.device) if suits else None

    def rows(self, rows: slice) -> Tensor:
        """Hidden states [n, D]; zero where the target is ignored, so that nothing of them can spread."""
        return self.hidden[rows].to(self.dtype).masked_fill(self.ignored[rows, None], 0)

    def product(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits [n, V] before their transform, rounded to the compute dtype."""
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """A tile's worth of memory, the same every time. [n, V]"""
        if dtype not in self._scratch:
            rows = min(len(self.hidden), self.tiles.rows)
            memory = torch.empty(rows, self.tiles.columns, dtype=dtype, device=self.weight.device)
            self._scratch[dtype] = memory[:, : len(self.weight)]
        return self._scratch[dtype]

    def target_logits(self, hidden: Tensor, rows: slice, transform: Transform) -> Tensor:
        """The targets' transformed logits [n], never rounded below float32."""
        if self.tiles.kernels:
            from ..kernels.linear_logps import target_logits

            return target_logits(hidden.contiguous(), self.weight, self.bias, self.targets[rows], *transform)
        x = torch.linalg.vecdot(hidden.to(self.accumulator), self.weight[self.index[rows]].to(self.accumulator))
        return transform.apply_(x if self.bias is None else x + self.bias[self.index[rows]])


@torch.library.custom_op("fastdpo::linear_logps_fwd", mutates_args=())
def _fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    statistics: str,
    compute_dtype: torch.dtype,
    keep: int,
    form_jacobian: bool,
) -> list[Tensor]:
    """kept gradient tiles [keep, V], jacobian [N or 0, D]; logps, shift, others, total, statistics; all [N]."""
    transform = Transform(softcap, logit_scale, temperature)
    kept, jacobian, *empty = _fwd_results(hidden, weight, statistics, compute_dtype, keep, form_jacobian)
    with torch.autocast(hidden.device.type, enabled=False):
        head = _Head(hidden, weight, bias, targets, compute_dtype)
        weight = head.weight.to(kept.dtype)
        parts: list[list[Tensor]] = []
        for rows in cuts(len(hidden), head.tiles.rows):
            gradient = None
            if rows.stop <= keep:
                gradient = kept[rows]
            elif form_jacobian:
                gradient = head.scratch(kept.dtype)[: rows.stop - rows.start]
            parts.append(_fwd_tile(head, rows, transform, statistics, gradient))
            if form_jacobian and gradient is not None:
                jacobian[rows] = _product(gradient, weight, jacobian.dtype)
        results = [torch.cat(x) for x in zip(*parts, strict=True)] if parts else empty
        return [kept, jacobian, *results]


def _fwd_tile(head: _Head, rows: slice, transform: Transform, statistics: str, gradient: Tensor | None) -> list[Tensor]:
    """The results of the rows; fills the gradient tile [n, V], if there is one."""
    h = head.rows(rows)
    target_logits = head.target_logits(h, rows, transform)
    if head.fused is not None:
        from ..kernels.linear_exp import linear_exp_fwd

        operands = (h.contiguous(), head.weight, head.bias, head.targets[rows], target_logits)
        return linear_exp_fwd(*operands, *transform, statistics, gradient, head.fused)
    place = head.scratch(head.dtype)[: len(h)] if gradient is None or gradient.dtype != head.dtype else gradient
    product = head.product(h, out=place)
    if head.tiles.kernels:
        from ..kernels.token_logps import token_logps_fwd

        return token_logps_fwd(product, head.targets[rows], *transform, statistics, target_logits, gradient)
    index, parts, narrow = head.index[rows], [], head.tiles.dtype != head.accumulator
    for block in blocks(len(product), len(head.weight), head.accumulator, product.device):
        z = transform.apply_(product[block].to(head.accumulator))
        slope = None if gradient is None else transform.slope(z)
        sums, exponentials = fold(z, index[block], target_logits[block], statistics)
        if gradient is not None:
            others = sums.others
            if narrow:
                _, others, factor = level(sums.shift, others)
                exponentials.mul_(factor[:, None])
            _put(gradient[block], gradient_tile(exponentials, index[block], others, slope))
        parts.append(sums)
    logps, shift, others, total, *extra = results_of(parts, h, head.ignored[rows], statistics)
    if narrow:
        shift, others, factor = level(shift, others)
        total *= factor
    return [logps, shift, others, total, *extra]


def _fwd_results(hidden, weight, statistics, compute_dtype, keep, form_jacobian):
    n, d = hidden.shape
    tiles = _Tiles.of(weight.shape[0], compute_dtype, hidden.device)
    kept = torch.empty(keep, tiles.columns, dtype=tiles.dtype, device=hidden.device)[:, : weight.shape[0]]
    wide = accumulator(compute_dtype)
    jacobian = torch.empty(n if form_jacobian else 0, d, dtype=wide, device=hidden.device)
    return [kept, jacobian, *empty_results(hidden, statistics)]


@_fwd.register_fake
def _(
    hidden,
    weight,
    bias,
    targets,
    softcap,
    logit_scale,
    temperature,
    statistics,
    compute_dtype,
    keep,
    form_jacobian,
):
    return _fwd_results(hidden, weight, statistics, compute_dtype, keep, form_jacobian)


def _gradients(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    kept: Tensor,
    jacobian: Tensor,
    sums: Sequence[Tensor],
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
    needs: Sequence[bool],
    main_grad: Tensor | None,
) -> list[Tensor]:
    """Gradients of hidden, weight and bias; empty where not needed. The weight's is added to main_grad if given."""
    transform = Transform(softcap, logit_scale, temperature)
    needs_hidden, _, needs_bias = needs
    grad_hidden, grad_weight, grad_bias = _bwd_results(hidden, weight, bias, needs)
    with torch.autocast(hidden.device.type, enabled=False):
        wide = accumulator(compute_dtype)
        of_logps, of_entropy = (
            torch.zeros_like(sums[-1]) if grad is None else grad.to(wide).masked_fill(targets == IGNORE_INDEX, 0)
            for grad in (grad_logps, grad_entropy)
        )
        scale = of_logps * row_scale(sums[-1], transform)  # [N]
        if len(jacobian) and grad_entropy is None:
            torch.mul(jacobian, scale[:, None], out=grad_hidden)
            return [grad_hidden, grad_weight, grad_bias]

        if not len(hidden):
            return [grad.zero_() for grad in (grad_hidden, grad_weight, grad_bias)]
        head = _Head(hidden, weight, bias, targets, compute_dtype)
        dtype, keep = kept.dtype, len(kept)
        if grad_entropy is not None:  # every tile again, and scaled: too small for float16
            dtype, keep, scale = wide if dtype == torch.float16 else dtype, 0, torch.ones_like(scale)
        tile_weight = head.weight.to(dtype)
        # Upstream gradients are too small for float16 too: hidden states are multiplied by shares of the largest.
        largest = scale.abs().amax().clamp(min=torch.finfo(wide).tiny) if dtype == torch.float16 else None
        share = scale if largest is None else scale / largest
        weight_sum = grad_weight if main_grad is None else main_grad
        apart = largest is not None or weight_sum.dtype != wide
        if apart:
            weight_sum = torch.empty_like(weight_sum, dtype=wide)
        bias_sum = torch.zeros(len(weight) if needs_bias else 0, dtype=wide, device=weight.device)
        # Kept tiles are multiplied at once, where that takes no wider copy of them.
        step = head.tiles.rows
        slices = [slice(0, keep)] if keep and (dtype == wide or head.tiles.kernels) else cuts(keep, step)
        slices += [slice(rows.start + keep, rows.stop + keep) for rows in cuts(len(hidden) - keep, step)]
        for rows in slices:
            h = head.rows(rows)
            if rows.stop <= keep:
                tile = kept[rows]
            else:
                tile = head.scratch(dtype)[: len(h)]
                upstream = None if grad_entropy is None else (of_logps[rows], of_entropy[rows])
                _bwd_tile(head, h, rows, transform, tile, RowSums(*(x[rows] for x in sums)), upstream)
            if needs_hidden:
                torch.mul(_product(tile, tile_weight, wide), scale[rows, None], out=grad_hidden[rows])
            if len(weight_sum):
                first = rows.start == 0 and (apart or main_grad is None)
                _add_product(weight_sum, tile.t(), (h.to(wide) * share[rows, None]).to(dtype), first)
            if needs_bias:
                _add_product(bias_sum[:, None], tile.t(), share[rows, None], first=rows.start == 0)
        if largest is not None:
            weight_sum *= largest
            bias_sum *= largest
        if apart and main_grad is not None:
            main_grad += weight_sum
        elif apart:
            grad_weight.copy_(weight_sum)
        if needs_bias:
            grad_bias.copy_(bias_sum)
        return [grad_hidden, grad_weight, grad_bias]


def _bwd_tile(
    head: _Head,
    h: Tensor,
    rows: slice,
    transform: Transform,
    tile: Tensor,
    sums: RowSums,
    upstream: tuple[Tensor, Tensor] | None,
) -> None:
    """Fills `tile` [n, V] with the gradient tile of hidden states [n, D], or with what upstream makes of it."""
    if head.fused is not None and upstream is None:
        from ..kernels.linear_exp import linear_exp_tile

        operands = (h.contiguous(), head.weight, head.bias, head.targets[rows], sums.shift, sums.others)
        linear_exp_tile(*operands, *transform, tile, head.fused)
        return
    product = head.product(h, out=head.scratch(head.dtype)[: len(h)])
    if head.tiles.kernels:
        from ..kernels.token_logps import token_logps_bwd

        of_logps, of_entropy = upstream or (None, None)
        token_logps_bwd(tile, of_logps, of_entropy, product, head.targets[rows], sums, *transform)
        return
    index = head.index[rows]
    for block in blocks(len(product), len(head.weight), head.accumulator, product.device):
        z = transform.apply_(product[block].to(head.accumulator))
        of_block = RowSums(*(x[block] for x in sums))
        if upstream is None:
            gradient = gradient_tile_again(z, index[block], of_block, transform.slope(z))
        else:
            of_logps, of_entropy = upstream[0][block], upstream[1][block]
            gradient = logit_gradient(z, index[block], of_block, of_logps, of_entropy, transform)
        _put(tile[block], gradient)


def _put(place: Tensor, tile: Tensor) -> None:
    """Writes a block of a gradient tile to its place, where it may have been made already."""
    if tile.data_ptr() != place.data_ptr():
        place.copy_(tile)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b` in a wider dtype than theirs, where that can be had not rounded to theirs first."""
    if a.dtype != dtype and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """`total (+)= a @ b` in the dtype of total, a wide one, whatever that of a and b."""
    beta = 0 if first else 1  # with 0 what total holds is ignored, so nothing needs filling
    if a.dtype != total.dtype and a.device.type == "cuda":
        torch.addmm(total, a, b.to(a.dtype), beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def _bwd_results(hidden, weight, bias, needs):
    empty = hidden.new_empty(0)
    return [
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else empty,
        torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[1] else empty.clone(),
        torch.empty_like(bias) if needs[2] else empty.clone(),
    ]


@torch.library.custom_op("fastdpo::linear_logps_bwd", mutates_args=())
def _bwd(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    kept: Tensor,
    jacobian: Tensor,
    sums: Sequence[Tensor],
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
    needs: Sequence[bool],
) -> list[Tensor]:
    inputs = (grad_logps, grad_entropy, hidden, weight, bias, targets, kept, jacobian, sums)
    return _gradients(*inputs, softcap, logit_scale, temperature, compute_dtype, needs, None)


@_bwd.register_fake
def _(grad_logps, grad_entropy, hidden, weight, bias, *rest):
    return _bwd_results(hidden, weight, bias, rest[-1])


@torch.library.custom_op("fastdpo::linear_logps_bwd_main_grad", mutates_args=("main_grad",))
def _bwd_main_grad(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    kept: Tensor,
    jacobian: Tensor,
    sums: Sequence[Tensor],
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
    needs: Sequence[bool],
    main_grad: Tensor,
) -> list[Tensor]:
    inputs = (grad_logps, grad_entropy, hidden, weight, bias, targets, kept, jacobian, sums)
    return _gradients(*inputs, softcap, logit_scale, temperature, compute_dtype, needs, main_grad)


@_bwd_main_grad.register_fake
def _(grad_logps, grad_entropy, hidden, weight, bias, *rest):
    return _bwd_results(hidden, weight, bias, rest[-2])


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, transform, statistics, compute_dtype, keep, form_jacobian, main_grad
    ):
        ctx.set_materialize_grads(False)
        kept, jacobian, *sums_and_extra = _fwd(
            hidden, weight, bias, targets, *transform, statistics, compute_dtype, keep, form_jacobian
        )
        sums, extra = sums_and_extra[:4], sums_and_extra[4:]
        ctx.save_for_backward(hidden, weight, bias, targets, kept, jacobian, *sums)
        ctx.transform, ctx.compute_dtype, ctx.main_grad = transform, compute_dtype, main_grad
        ctx.entropy = "entropy" in statistics
        ctx.mark_non_differentiable(*extra[ctx.entropy :])
        return (sums[0], *extra)

    @staticmethod
    def backward(ctx, grad_logps, *grad_extra):
        *inputs, logps, shift, others, total = ctx.saved_tensors
        upstream = (grad_logps, grad_extra[0] if ctx.entropy else None)
        needs = [bool(needed) for needed in ctx.needs_input_grad[:3]]
        arguments = (*upstream, *inputs, [logps, shift, others, total], *ctx.transform, ctx.compute_dtype)
        if ctx.main_grad is not None and needs[1]:
            needs[1] = False
            grads = _bwd_main_grad(*arguments, needs, ctx.main_grad)
        else:
            grads = _bwd(*arguments, needs)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=True)), *[None] * 7


def linear_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logps",),
    memory_budget: int = MEMORY_BUDGET,
    main_grad: Tensor | None = None,
) -> TokenLogps:
    """Log-probability of each target under `softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)`.

    Logits exist for one tile of tokens at a time. What the backward costs depends on what needs a gradient:

    - nothing: forward only, 1 GEMM over `[N, D] x [D, V]`;
    - hidden alone (LoRA, a frozen head): the gradient is formed in the forward, 2 GEMMs, `[N, D]` float32 kept;
    - the head: tiles up to `memory_budget` are kept for the backward, 3 GEMMs; what does not fit is computed again, 4.
      A gradient that reaches `entropy` computes everything again. Under `torch.compile`, detach an entropy that leaves
      the graph only to be logged: a compiled graph can't tell that no gradient will come.

    The product is rounded to the compute dtype (that of hidden, or autocast's), as in plain PyTorch, but the target's
    logit is taken in float32 and kept out of the sum over the others. Gradients of the weight are summed in float32.
    Meaning: `fastdpo.ops.reference.linear_logps`.

    A head with a low-rank adapter, `W + s B A`, is a head too, that of hidden states widened by the adapter's rank:
    `linear_logps(cat([h, s * h @ A.T], 1), cat([W, B], 1), targets)`. No merged weight is built; the gradient is that
    of a trainable head.

    Extra memory beside the results and gradients: `min(memory_budget, N * V * itemsize)` from forward to backward if
    the head needs a gradient, and while it runs one tile of logits (in float16 on a CPU two, tiles are float32 there),
    of at most 64 MiB in float32 or 256 tokens, whichever is more, and a few blocks of 8 MiB (off the CPU, tiles in
    float32); on CUDA instead one tile of at most 256 MiB or 256 tokens, and nothing else of its size. A copy of a
    weight whose dtype is not the compute dtype, and in float16 on a CPU another in float32. The weight's gradient is
    summed in `[V, D]` float32.

    Args:
        hidden: [N, D] float16, bfloat16, float32 or float64.
        weight: [V, D], cast to the compute dtype. Neither sharded (DTensor) nor a ZeRO-3 placeholder.
        targets: [N] int32 or int64 ids below V. Where it is -100 every result and every gradient is exactly zero.
        bias: [V] or None.
        softcap: the bound of Gemma 2's `softcap * tanh(x / softcap)` (arXiv 2408.00118, section 2), or None.
        logit_scale: multiplies the logits before the cap.
        temperature: divides them after it.
        outputs: names of the fields of `TokenLogps` to fill; `logps` always is.
        memory_budget: bytes of gradient tiles to keep for the backward of a trainable head.
        main_grad: [V, D] float32, as Megatron-LM keeps one for each parameter. The weight's gradient is added to it,
            unrounded, and `weight.grad` stays as it is: hooks on the weight see nothing.

    Returns:
        `TokenLogps` with fields [N].

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
    """
    checks.require_floating(OP, hidden=hidden, weight=weight, bias=bias)
    checks.require(hidden.dim() == 2, OP, "hidden", "be [N, D]", list(hidden.shape))
    checks.require_whole(OP, weight=weight, bias=bias)
    d = hidden.shape[1]
    matches = weight.dim() == 2 and weight.shape[0] > 0 and weight.shape[1] == d
    expected = "be [V, {}], V > 0 (a shard of FSDP or ZeRO-3? call the op inside the head module's forward)"
    checks.require(matches, OP, "weight", expected, list(weight.shape), d)
    if bias is not None:
        checks.require(tuple(bias.shape) == (len(weight),), OP, "bias", "be [{}]", list(bias.shape), len(weight))
    checks.require_targets(OP, targets, hidden.shape[:1])
    checks.require_same_device(OP, hidden=hidden, weight=weight, bias=bias, targets=targets)
    checks.require_transform(OP, softcap, temperature)
    checks.require(memory_budget >= 0, OP, "memory_budget", "be a number of bytes, 0 or more", memory_budget)
    statistics = checks.requested(OP, outputs)
    checks.require_same_device(OP, weight=weight, main_grad=main_grad)

    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    compute_dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    if main_grad is not None:
        fits = main_grad.shape == weight.shape and main_grad.dtype == accumulator(compute_dtype)
        got = f"{list(main_grad.shape)} {main_grad.dtype}"
        checks.require(fits, OP, "main_grad", "be {} in {}", got, list(weight.shape), accumulator(compute_dtype))
    grad = torch.is_grad_enabled()
    head_grad = grad and (weight.requires_grad or (bias is not None and bias.requires_grad))
    tiles = _Tiles.of(weight.shape[0], compute_dtype, hidden.device)
    keep = tiles.kept(hidden.shape[0], memory_budget) if head_grad else 0
    form_jacobian = grad and hidden.requires_grad and not head_grad
    transform = Transform(softcap, logit_scale, temperature)
    logps, *extra = _LinearLogps.apply(
        hidden, weight, bias, targets, transform, statistics, compute_dtype, keep, form_jacobian, main_grad
    )
    return named_results(logps, extra, statistics, targets.shape)
