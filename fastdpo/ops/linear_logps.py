"""Log-probabilities straight from hidden states and the head's weight: the `[N, V]` logits are never stored whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..packing import IGNORE_INDEX
from . import checks
from .head_tiles import (
    MEMORY_BUDGET,
    Head,
    HeadCall,
    Tiles,
    add_product,
    empty_gradients,
    product,
    shares,
    take_kept,
)
from .logit_rows import Transform, accumulator, cuts, scaled_upstream
from .results import TokenLogps
from .token_logps import empty_results, named_results

OP = "linear_logps"


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
        head = Head(OP, hidden, weight, bias, targets, compute_dtype, transform)
        tile_weight = head.weight.to(kept.dtype) if form_jacobian else head.weight  # in float16 a CPU's is a copy
        parts: list[list[Tensor]] = []
        for rows in cuts(len(hidden), head.tiles.rows):
            gradient = None
            if rows.stop <= keep:
                gradient = kept[rows]
            elif form_jacobian:
                gradient = head.scratch(rows, kept.dtype)
            parts.append(head.results(rows, statistics, gradient))
            if form_jacobian and gradient is not None:
                jacobian[rows] = product(gradient, tile_weight, jacobian.dtype)
        results = [torch.cat(x) for x in zip(*parts, strict=True)] if parts else empty
        return [kept, jacobian, *results]


def _fwd_results(hidden, weight, statistics, compute_dtype, keep, form_jacobian):
    kept = Tiles.of(weight, compute_dtype).empty(keep, weight)
    n, d = hidden.shape
    jacobian = hidden.new_empty(n if form_jacobian else 0, d, dtype=accumulator(compute_dtype))
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
    grad_hidden, grad_weight, grad_bias = empty_gradients(hidden, weight, bias, needs)
    with torch.autocast(hidden.device.type, enabled=False):
        wide = accumulator(compute_dtype)
        of_logps, of_entropy = (
            torch.zeros_like(sums[-1]) if grad is None else grad.to(wide).masked_fill(targets == IGNORE_INDEX, 0)
            for grad in (grad_logps, grad_entropy)
        )
        scale = scaled_upstream(of_logps, sums[-1], transform)  # [N]
        if len(jacobian) and grad_entropy is None:
            torch.mul(jacobian, scale[:, None], out=grad_hidden)
            return [grad_hidden, grad_weight, grad_bias]

        if not len(hidden):
            return [grad.zero_() for grad in (grad_hidden, grad_weight, grad_bias)]
        head = Head(OP, hidden, weight, bias, targets, compute_dtype, transform)
        dtype, keep, upstream = kept.dtype, len(kept), None
        if grad_entropy is not None:  # every tile again, and scaled: too small for float16
            upstream, scale = (of_logps, of_entropy), torch.ones_like(scale)
            dtype, keep = wide if dtype == torch.float16 else dtype, 0
        tile_weight = head.weight.to(dtype) if needs_hidden else head.weight
        share, largest = shares(scale, dtype)
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
            tile = kept[rows] if rows.stop <= keep else head.gradient_again(rows, sums, upstream, dtype)
            if needs_hidden:
                torch.mul(product(tile, tile_weight, wide), scale[rows, None], out=grad_hidden[rows])
            if len(weight_sum):
                h = (head.rows(rows).to(wide) * share[rows, None]).to(dtype)
                add_product(weight_sum, tile.t(), h, first=rows.start == 0 and (apart or main_grad is None))
            if needs_bias:
                add_product(bias_sum[:, None], tile.t(), share[rows, None], first=rows.start == 0)
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
    return empty_gradients(hidden, weight, bias, rest[-1])


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
) -> tuple[Tensor, Tensor, Tensor]:  # compilers take no list from an op that writes to an argument
    inputs = (grad_logps, grad_entropy, hidden, weight, bias, targets, kept, jacobian, sums)
    of_hidden, of_weight, of_bias = _gradients(
        *inputs, softcap, logit_scale, temperature, compute_dtype, needs, main_grad
    )
    return of_hidden, of_weight, of_bias


@_bwd_main_grad.register_fake
def _(grad_logps, grad_entropy, hidden, weight, bias, *rest):
    return tuple(empty_gradients(hidden, weight, bias, rest[-2]))


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
        ctx.kept = kept
        ctx.save_for_backward(hidden, weight, bias, targets, jacobian, *sums)
        ctx.transform, ctx.compute_dtype, ctx.main_grad = transform, compute_dtype, main_grad
        ctx.entropy = "entropy" in statistics
        ctx.mark_non_differentiable(*extra[ctx.entropy :])
        return (sums[0], *extra)

    @staticmethod
    def backward(ctx, grad_logps, *grad_extra):
        *inputs, jacobian, logps, shift, others, total = ctx.saved_tensors
        kept = take_kept(ctx)
        upstream = (grad_logps, grad_extra[0] if ctx.entropy else None)
        if upstream == (None, None):
            return (None,) * 10
        needs = [bool(needed) for needed in ctx.needs_input_grad[:3]]
        sums = [logps, shift, others, total]
        arguments = (*upstream, *inputs, kept, jacobian, sums, *ctx.transform, ctx.compute_dtype)
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
    summed in `[V, D]` float32. Kept tiles are not saved tensors of autograd: hooks on those, such as activation
    offloading and checkpointing install, leave them where they are.

    Args:
        hidden: [N, D] float16, bfloat16, float32 or float64.
        weight: [V, D], cast to the compute dtype. Neither sharded (DTensor) nor a ZeRO-3 placeholder.
        targets: [N] int32 or int64 ids below V. Where it is -100 every result and every gradient is exactly zero. Any
            other id: as in `token_logps`.
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
    options = (softcap, logit_scale, temperature, outputs, memory_budget)
    call = HeadCall.of(OP, hidden, weight, targets, bias, *options)
    checks.require_same_device(OP, weight=weight, main_grad=main_grad)
    if main_grad is not None:
        wide = accumulator(call.compute_dtype)
        fits, got = main_grad.shape == weight.shape and main_grad.dtype == wide, list(main_grad.shape)
        checks.require(fits, OP, "main_grad", "be {} in {}", f"{got} {main_grad.dtype}", list(weight.shape), wide)
    keep = Tiles.of(weight, call.compute_dtype).kept(len(hidden), memory_budget) if call.trains_head else 0
    logps, *extra = _LinearLogps.apply(*call.inputs, keep, call.forms_jacobian, main_grad)
    return named_results(logps, extra, call.statistics, targets.shape)
