"""Log-probabilities straight from hidden states and the head's weight: the `[N, V]` logits are never stored whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..packing import IGNORE_INDEX
from . import checks
from .logit_rows import (
    BlockSums,
    RowSums,
    Transform,
    accumulator,
    blocks,
    fold,
    gradient_tile,
    gradient_tile_again,
    logit_gradient,
    row_scale,
    tile_rows,
    tiles,
)
from .results import TokenLogps
from .token_logps import empty_results, named_results, results_of, split_targets

OP = "linear_logps"
MEMORY_BUDGET = 512 << 20  # bytes


def tile_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """What gradient tiles are kept and multiplied in. float16 has too small a range for unscaled sums."""
    return torch.float32 if compute_dtype == torch.float16 else compute_dtype


def kept_rows(n: int, vocabulary: int, compute_dtype: torch.dtype, budget: int) -> int:
    """How many tokens' gradient tiles fit in the budget: all, or whole tiles of the loop over tokens."""
    fit = budget // (vocabulary * tile_dtype(compute_dtype).itemsize)
    step = tile_rows(vocabulary, accumulator(compute_dtype))
    return min(n, n if n <= fit else fit // step * step)


class _Head:
    """One call's operands, in the dtype that it computes in."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dtype: torch.dtype):
        self.ignored, self.index = split_targets(OP, targets, weight.shape[0])
        self.hidden, self.dtype = hidden, dtype
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.accumulator = accumulator(dtype)

    @cached_property
    def tile_weight(self) -> Tensor:
        """The weight that gradient tiles are multiplied with. [V, D]"""
        return self.weight.to(tile_dtype(self.dtype))

    def rows(self, rows: slice) -> Tensor:
        """Hidden states [n, D]; zero where the target is ignored, so that nothing of them can spread."""
        return self.hidden[rows].to(self.dtype).masked_fill(self.ignored[rows, None], 0)

    def product(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Logits [n, V] before their transform, rounded to the compute dtype."""
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """A tile's worth of memory."""
        vocabulary = len(self.weight)
        rows = min(len(self.hidden), tile_rows(vocabulary, self.accumulator))
        return torch.empty(rows, vocabulary, dtype=dtype, device=self.weight.device)

    def target_logits(self, hidden: Tensor, rows: slice, transform: Transform) -> Tensor:
        """The targets' transformed logits [n], never rounded below float32."""
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
    """kept gradient tiles [keep, V], jacobian [N or 0, D], then logps, shift, others, total, statistics; each [N]."""
    transform = Transform(softcap, logit_scale, temperature)
    kept, jacobian, *_ = _fwd_results(hidden, weight, statistics, compute_dtype, keep, form_jacobian)
    with torch.autocast(hidden.device.type, enabled=False):
        head = _Head(hidden, weight, bias, targets, compute_dtype)
        products = gradients = None
        parts: list[BlockSums] = []
        for rows in tiles(len(hidden), len(weight), head.accumulator):
            n, is_kept = rows.stop - rows.start, rows.stop <= keep
            if is_kept and kept.dtype == compute_dtype:
                product = kept[rows]
            else:
                products = head.scratch(compute_dtype) if products is None else products
                product = products[:n]
            gradient = None
            if is_kept:
                gradient = kept[rows]
            elif form_jacobian and jacobian.dtype == compute_dtype:
                gradient = product
            elif form_jacobian:
                gradients = head.scratch(jacobian.dtype) if gradients is None else gradients
                gradient = gradients[:n]
            parts += _fwd_tile(head, rows, transform, statistics, product, gradient)
            if form_jacobian and gradient is not None:
                torch.mm(gradient, head.tile_weight, out=jacobian[rows])
        return [kept, jacobian, *results_of(parts, hidden, head.ignored, statistics)]


def _fwd_tile(
    head: _Head, rows: slice, transform: Transform, statistics: str, product: Tensor, gradient: Tensor | None
) -> Iterator[BlockSums]:
    """The sums of the rows, by way of `product` [n, V]; fills the gradient tile, which may be the same."""
    h = head.rows(rows)
    head.product(h, out=product)
    index, own = head.index[rows], head.target_logits(h, rows, transform)
    for block in blocks(len(product), len(head.weight), head.accumulator, product.device):
        z = transform.apply_(product[block].to(head.accumulator))
        slope = None if gradient is None else transform.slope(z)
        sums, exponentials = fold(z, index[block], own[block], statistics)
        if gradient is not None:
            _put(gradient[block], gradient_tile(exponentials, index[block], sums.others, slope))
        yield sums


def _fwd_results(hidden, weight, statistics, compute_dtype, keep, form_jacobian):
    dtype = tile_dtype(compute_dtype)
    n, d = hidden.shape
    kept = torch.empty(keep, weight.shape[0], dtype=dtype, device=hidden.device)
    jacobian = torch.empty(n if form_jacobian else 0, d, dtype=dtype, device=hidden.device)
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
    """Gradients of hidden, weight and bias; empty where not needed."""
    transform = Transform(softcap, logit_scale, temperature)
    needs_hidden, needs_weight, needs_bias = needs
    grad_hidden, grad_weight, grad_bias = _bwd_results(hidden, weight, bias, needs)
    with torch.autocast(hidden.device.type, enabled=False):
        dtype, wide = tile_dtype(compute_dtype), accumulator(compute_dtype)
        of_logps, of_entropy = (
            torch.zeros_like(sums[-1]) if grad is None else grad.to(wide).masked_fill(targets == IGNORE_INDEX, 0)
            for grad in (grad_logps, grad_entropy)
        )
        scale = of_logps * row_scale(sums[-1], transform)  # [N]
        if len(jacobian) and grad_entropy is None:
            grad_hidden.copy_(jacobian.to(wide) * scale[:, None])
            return [grad_hidden, grad_weight, grad_bias]

        head = _Head(hidden, weight, bias, targets, compute_dtype)
        weight_sum = None
        if needs_weight:
            weight_sum = grad_weight if weight.dtype == wide else torch.empty_like(grad_weight, dtype=wide)
        bias_sum = torch.zeros(len(weight) if needs_bias else 0, dtype=wide, device=weight.device)
        keep = len(kept) if grad_entropy is None else 0
        # Kept tiles of the accumulator's dtype are multiplied at once; narrower ones are widened a tile at a time.
        slices = [slice(0, keep)] if keep and dtype == wide else tiles(keep, len(weight), wide)
        slices += [slice(rows.start + keep, rows.stop + keep) for rows in tiles(len(hidden) - keep, len(weight), wide)]
        products = gradients = None
        for rows in slices:
            h, factor = head.rows(rows), scale[rows, None]
            if rows.stop <= keep:
                tile = kept[rows]
            else:
                products = head.scratch(compute_dtype) if products is None else products
                if gradients is None:
                    gradients = products if dtype == compute_dtype else head.scratch(dtype)
                product = head.product(h, out=products[: len(h)])
                tile = gradients[: len(h)]
                index, own_sums = head.index[rows], RowSums(*(x[rows] for x in sums))
                for block in blocks(len(product), len(weight), head.accumulator, product.device):
                    z = transform.apply_(product[block].to(wide))
                    block_sums = RowSums(*(x[block] for x in own_sums))
                    if grad_entropy is None:
                        gradient = gradient_tile_again(z, index[block], block_sums, transform.slope(z))
                    else:
                        upstream = of_logps[rows][block], of_entropy[rows][block]
                        gradient = logit_gradient(z, index[block], block_sums, *upstream, transform)
                    _put(tile[block], gradient)
                if grad_entropy is not None:
                    factor = torch.ones_like(factor)  # the tile is scaled already
            if needs_hidden:
                grad_hidden[rows] = (tile @ head.tile_weight).to(wide) * factor
            if weight_sum is not None:
                _add_product(weight_sum, tile.t(), (h.to(wide) * factor).to(dtype), first=rows.start == 0)
            if needs_bias:
                bias_sum += tile.t().to(wide) @ factor[:, 0]
        if not len(hidden):
            grad_weight.zero_()
        elif weight_sum is not None and weight_sum is not grad_weight:
            grad_weight.copy_(weight_sum)
        if needs_bias:
            grad_bias.copy_(bias_sum)
        return [grad_hidden, grad_weight, grad_bias]


def _put(place: Tensor, tile: Tensor) -> None:
    """Writes a block of a gradient tile to its place, where it may have been made already."""
    if tile.data_ptr() != place.data_ptr():
        place.copy_(tile)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """`total (+)= a @ b` in the dtype of total, a wide one, whatever that of a and b."""
    beta = 0 if first else 1  # with 0 what total holds is ignored, so nothing needs filling
    if a.dtype != total.dtype and a.device.type == "cuda":
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


def _bwd_results(hidden, weight, bias, needs):
    empty = hidden.new_empty(0)
    return [
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else empty,
        torch.empty_like(weight, memory_format=torch.contiguous_format) if needs[1] else empty.clone(),
        torch.empty_like(bias) if needs[2] else empty.clone(),
    ]


@_bwd.register_fake
def _(
    grad_logps,
    grad_entropy,
    hidden,
    weight,
    bias,
    targets,
    kept,
    jacobian,
    sums,
    softcap,
    logit_scale,
    temperature,
    compute_dtype,
    needs,
):
    return _bwd_results(hidden, weight, bias, needs)


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, statistics, compute_dtype, keep, form_jacobian):
        ctx.set_materialize_grads(False)
        kept, jacobian, *sums_and_extra = _fwd(
            hidden, weight, bias, targets, *transform, statistics, compute_dtype, keep, form_jacobian
        )
        sums, extra = sums_and_extra[:4], sums_and_extra[4:]
        ctx.save_for_backward(hidden, weight, bias, targets, kept, jacobian, *sums)
        ctx.transform, ctx.compute_dtype = transform, compute_dtype
        ctx.entropy = "entropy" in statistics
        ctx.mark_non_differentiable(*extra[ctx.entropy :])
        return (sums[0], *extra)

    @staticmethod
    def backward(ctx, grad_logps, *grad_extra):
        hidden, weight, bias, targets, kept, jacobian, *sums = ctx.saved_tensors
        needs = [bool(needed) for needed in ctx.needs_input_grad[:3]]
        grads = _bwd(
            grad_logps,
            grad_extra[0] if ctx.entropy else None,
            hidden,
            weight,
            bias,
            targets,
            kept,
            jacobian,
            sums,
            *ctx.transform,
            ctx.compute_dtype,
            needs,
        )
        return *(g if needed else None for g, needed in zip(grads, needs, strict=True)), *[None] * 6


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
) -> TokenLogps:
    """Log-probability of each target under `softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)`.

    Logits exist for one tile of tokens at a time. What the backward costs depends on what needs a gradient:

    - nothing: forward only, 1 GEMM over `[N, D] x [D, V]`;
    - hidden alone (LoRA, a frozen head): the gradient is formed in the forward, 2 GEMMs, `[N, D]` kept;
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
    the head needs a gradient, and while it runs one tile of logits (in float16 two), of at most 64 MiB in float32 or
    256 tokens, whichever is more, and a few blocks of 8 MiB (off the CPU, tiles in float32); a copy of a weight whose
    dtype is not the compute dtype, and in float16 another in float32 for its gradients. The weight's gradient is summed
    in `[V, D]` float32.

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

    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    compute_dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    grad = torch.is_grad_enabled()
    head_grad = grad and (weight.requires_grad or (bias is not None and bias.requires_grad))
    keep = kept_rows(hidden.shape[0], weight.shape[0], compute_dtype, memory_budget) if head_grad else 0
    form_jacobian = grad and hidden.requires_grad and not head_grad
    transform = Transform(softcap, logit_scale, temperature)
    logps, *extra = _LinearLogps.apply(
        hidden, weight, bias, targets, transform, statistics, compute_dtype, keep, form_jacobian
    )
    return named_results(logps, extra, statistics, targets.shape)
