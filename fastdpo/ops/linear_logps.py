"""Log-probabilities from hidden states and the head's weight, without `[N, V]` logits.

Dimensions: N scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph as _retains_graph

from .. import checks
from ..packing import IGNORE_INDEX
from .dtypes import accumulation_dtype
from .head_budget import default_budget
from .head_tiles import (
    GradientSum,
    Head,
    HeadCall,
    TileFormat,
    empty_gradients,
    split_row_scale,
    wide_product,
)
from .logit_rows import RowSums, upstream_scale
from .results import TokenLogps, empty_results, named_results, requested_statistics, statistic_names

OP = "linear_logps"


@torch.library.custom_op("fastdpo::linear_logps_fwd", mutates_args=())
def linear_logps_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
    statistics: str,
    keep: int,
    form_jacobian: bool,
) -> list[Tensor]:
    """The forward.

    Returns:
        Gradient tiles of the first `keep` tokens [keep, V]; the jacobian `d logp / d hidden`
        [N, D], or [0, D] if not `form_jacobian`; then logps, shift, others, total and the
        statistics, [N] each.
    """
    kept, jacobian, *empty = _empty_outputs(hidden, weight, compute_dtype, statistics, keep, form_jacobian)
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(OP, HeadCall(hidden, weight, bias, targets, softcap, logit_scale, temperature, compute_dtype))
        tile_weight = head.weight.to(kept.dtype) if form_jacobian else head.weight  # widened for float16 on a CPU
        parts: list[list[Tensor]] = []
        for rows in head.tiles():
            gradient = None
            if rows.stop <= keep:
                gradient = kept[rows]
            elif form_jacobian:
                gradient = head.scratch(rows, kept.dtype)
            parts.append(head.results(rows, statistics, gradient))
            if form_jacobian and gradient is not None:
                wide_product(gradient, tile_weight, jacobian[rows])
        results = [torch.cat(x) for x in zip(*parts, strict=True)] if parts else empty
        return [kept, jacobian, *results]


def _empty_outputs(hidden, weight, compute_dtype, statistics, keep, form_jacobian):
    kept = TileFormat.of(weight, compute_dtype).allocate(keep, weight)
    n, d = hidden.shape
    jacobian = hidden.new_empty(n if form_jacobian else 0, d, dtype=accumulation_dtype(compute_dtype))
    return [kept, jacobian, *empty_results(hidden, statistics)]


@linear_logps_fwd.register_fake
def _(hidden, weight, bias, targets, softcap, logit_scale, temperature, compute_dtype, *options):
    return _empty_outputs(hidden, weight, compute_dtype, *options)


@torch.library.custom_op("fastdpo::linear_logps_bwd", mutates_args=("main_grad",))
def linear_logps_bwd(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    kept: Tensor,
    jacobian: Tensor,
    sums: Sequence[Tensor],
    needs: Sequence[bool],
    main_grad: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # compilers do not take a list from an op that mutates an argument
    """Gradients of hidden, weight and bias, without elements where not needed.

    The gradient of the weight is added to `main_grad` if it is given.
    """
    call = HeadCall(hidden, weight, bias, targets, softcap, logit_scale, temperature, compute_dtype)
    grads = grad_hidden, grad_weight, grad_bias = empty_gradients(hidden, weight, bias, needs)
    needs_hidden, needs_weight, needs_bias = needs
    wide, row_sums = accumulation_dtype(compute_dtype), RowSums(*sums)
    with torch.autocast(hidden.device.type, enabled=False):
        upstream_logps, upstream_entropy = (
            torch.zeros_like(row_sums.total) if grad is None else grad.to(wide).masked_fill(targets == IGNORE_INDEX, 0)
            for grad in (grad_logps, grad_entropy)
        )
        scale = upstream_scale(upstream_logps, row_sums.total, call.transform)  # [N]
        if len(jacobian) and grad_entropy is None:
            torch.mul(jacobian, scale[:, None], out=grad_hidden)
            return grads
        if not len(hidden):
            for grad in grads:
                grad.zero_()
            return grads

        head, dtype = Head(OP, call), kept.dtype
        if grad_entropy is None:
            tiles = head.gradient_tiles(kept, row_sums)
        else:  # these tiles are scaled already, by upstream gradients that may be too small for float16
            dtype, scale = wide if dtype == torch.float16 else dtype, torch.ones_like(scale)
            tiles = head.logit_gradients(row_sums, upstream_logps, upstream_entropy, dtype)
        row_scale, common_scale = split_row_scale(scale, dtype)
        tile_weight = head.weight.to(dtype) if needs_hidden else head.weight
        weight_sum = bias_sum = None
        if main_grad is not None:
            weight_sum = GradientSum(main_grad, wide, common_scale, accumulate=True)
        elif needs_weight:
            weight_sum = GradientSum(grad_weight, wide, common_scale)
        if needs_bias:
            bias_sum = GradientSum(grad_bias[:, None], wide, common_scale)
        for rows, tile in tiles:
            if needs_hidden:
                place = grad_hidden[rows]
                product = place if place.dtype == wide else torch.empty_like(place, dtype=wide)
                torch.mul(wide_product(tile, tile_weight, product), scale[rows, None], out=place)
            if weight_sum is not None:
                scaled_rows = head.hidden_rows(rows).to(wide) * row_scale[rows, None]
                weight_sum.add(tile, scaled_rows.to(dtype))
            if bias_sum is not None:
                bias_sum.add(tile, row_scale[rows, None])
        for gradient_sum in (weight_sum, bias_sum):
            if gradient_sum is not None:
                gradient_sum.finish()
        return grads


@linear_logps_bwd.register_fake
def _(grad_logps, grad_entropy, kept, jacobian, sums, needs, main_grad, hidden, weight, bias, *rest):
    return empty_gradients(hidden, weight, bias, needs)


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        softcap,
        logit_scale,
        temperature,
        compute_dtype,
        statistics,
        keep,
        form_jacobian,
        main_grad,
    ):
        ctx.set_materialize_grads(False)
        scalars = softcap, logit_scale, temperature, compute_dtype
        kept, jacobian, *results = linear_logps_fwd(
            hidden, weight, bias, targets, *scalars, statistics, keep, form_jacobian
        )
        logps, shift, others, total, *extra = results
        ctx.kept = kept
        ctx.save_for_backward(hidden, weight, bias, targets, jacobian, logps, shift, others, total)
        ctx.scalars, ctx.main_grad, ctx.has_entropy = scalars, main_grad, "entropy" in statistic_names(statistics)
        ctx.mark_non_differentiable(*extra[ctx.has_entropy :])
        return (logps, *extra)

    @staticmethod
    def backward(ctx, grad_logps, *grad_extra):
        hidden, weight, bias, targets, jacobian, *sums = ctx.saved_tensors
        kept = take_kept(ctx)
        grad_entropy = grad_extra[0] if ctx.has_entropy else None
        if grad_logps is None and grad_entropy is None:
            return (None,) * 12
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        main_grad = ctx.main_grad if needs_weight else None
        needs = [needs_hidden, needs_weight and main_grad is None, needs_bias]
        call = HeadCall(hidden, weight, bias, targets, *ctx.scalars)
        grads = linear_logps_bwd(grad_logps, grad_entropy, kept, jacobian, sums, needs, main_grad, *call)
        return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *[None] * 9


def take_kept(ctx: Any) -> Any:
    """Returns what the forward kept, such as gradient tiles, and frees it unless the graph is
    retained.

    Autograd does not save these tensors, so hooks on saved tensors do not move them to the host
    with the activations.
    """
    kept = ctx.kept
    if not (torch.compiler.is_compiling() or _retains_graph()):
        ctx.kept = None
    return kept


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
    memory_budget: int | None = None,
    main_grad: Tensor | None = None,
) -> TokenLogps:
    """Log-probability of each target under the softmax of a head's transformed logits.

    The distribution is `softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)`.

    Defined by `fastdpo.ops.reference.linear_logps`.

    Logits exist for one tile of tokens at a time. The cost depends on what needs a gradient:

    - nothing: the forward, one GEMM over `[N, D] x [D, V]`.
    - only `hidden` (LoRA, a frozen head): the gradient is formed in the forward. Two GEMMs;
      `[N, D]` in float32 is kept for the backward.
    - the head: gradient tiles of up to `memory_budget` bytes are kept for the backward, at three
      GEMMs in total. The remaining tiles are recomputed, at four.

    A gradient that reaches `entropy` recomputes all tiles. Under `torch.compile`, detach an entropy
    that leaves the graph only to be logged: a compiled graph cannot tell that no gradient will
    arrive.

    Logits are rounded to the compute dtype (that of `hidden`, or autocast's), as in plain PyTorch,
    but the target's logit is computed in float32 and kept out of the sum over the other vocabulary
    entries. Gradients of the weight are summed in float32.

    A low-rank adapter of the head, `W + s B A`, needs no merged weight: extend the hidden states by
    the rank of the adapter, `linear_logps(cat([h, s * h @ A.T], 1), cat([W, B], 1), targets)`. The
    cost is that of a trainable head.

    Memory in addition to results and gradients:

    - up to `memory_budget` bytes, and `N * V * itemsize` at most, from forward to backward if the
      head needs a gradient;
    - while the op runs, one tile of logits. On CUDA, a tile has 4096 tokens if they fit in a 32nd
      of the GPU's memory, otherwise those that fit there, but at least 256 MiB and 256 tokens.
      Elsewhere, at most 64 MiB in float32 or 256 tokens, whichever is more, and a few blocks of 8
      MiB on a CPU or further tiles in float32 on other devices. float16 on a CPU takes two tiles,
      because gradient tiles are float32 there;
    - a copy of the weight if its dtype is not the compute dtype, and one more in float32 for
      float16 on a CPU;
    - `[V, D]` in float32 for the sum of the weight's gradient.

    The kept tiles are not saved tensors of autograd: hooks on saved tensors, such as activation
    offloading and checkpointing install, do not see them.

    Args:
        hidden: [N, D] float16, bfloat16, float32 or float64.
        weight: [V, D], cast to the compute dtype. Neither sharded (DTensor) nor a ZeRO-3
            placeholder.
        targets: [N] int32 or int64 ids below V. Where the target is -100, every result and every
            gradient is exactly zero. Other ids are handled as in `token_logps`.
        bias: [V] or None.
        softcap: the bound of Gemma 2's `softcap * tanh(x / softcap)` (arXiv 2408.00118, section 2),
            or None.
        logit_scale: multiplies the logits before the softcap.
        temperature: divides the logits after the softcap.
        outputs: names of the fields of `TokenLogps` to fill. `logps` is always filled.
        memory_budget: maximum number of bytes of gradient tiles kept for the backward of a
            trainable head. Default: 512 MiB; on a GPU, a 16th of its memory or twice the size of
            the weight's gradient in float32, whichever is more, and at least 512 MiB.
        main_grad: [V, D] float32 (float64 for float64 inputs), the buffer that Megatron-LM keeps
            for each parameter. The weight's gradient is added to it without rounding. `weight.grad`
            does not change, and hooks on the weight do not run.

    Returns:
        `TokenLogps` with fields [N].

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    check_head(OP, hidden, weight, targets, bias, softcap, logit_scale, temperature, memory_budget)
    checks.require_tensors_or_none(OP, main_grad=main_grad)
    statistics = requested_statistics(OP, outputs)
    compute_dtype = compute_dtype_of(hidden)
    checks.require_same_device(OP, weight=weight, main_grad=main_grad)
    if main_grad is not None:
        wide = accumulation_dtype(compute_dtype)
        fits, got = main_grad.shape == weight.shape and main_grad.dtype == wide, list(main_grad.shape)
        checks.require(fits, OP, "main_grad", "be {} in {}", f"{got} {main_grad.dtype}", list(weight.shape), wide)

    grad_enabled = torch.is_grad_enabled()
    trains_head = grad_enabled and (weight.requires_grad or (bias is not None and bias.requires_grad))
    form_jacobian = grad_enabled and hidden.requires_grad and not trains_head
    budget = default_budget(weight) if memory_budget is None else memory_budget
    keep = TileFormat.of(weight, compute_dtype).rows_within(len(hidden), budget) if trains_head else 0
    call = HeadCall(hidden, weight, bias, targets, softcap, logit_scale, temperature, compute_dtype)
    logps, *extra = _LinearLogps.apply(*call, statistics, keep, form_jacobian, main_grad)
    return named_results(logps, extra, statistics, targets.shape)


def compute_dtype_of(hidden: Tensor) -> torch.dtype:
    """The dtype in which a head multiplies: that of `hidden`, or autocast's."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else hidden.dtype


def check_head(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    memory_budget: int | None,
) -> None:
    """The checks of a head's arguments, which `linear_logps` documents."""
    checks.require_tensors(op, hidden=hidden, weight=weight, targets=targets)
    checks.require_tensors_or_none(op, bias=bias)
    checks.require_values(op, hidden=hidden)
    checks.require_transform(op, softcap, logit_scale, temperature)
    checks.require_floating(op, hidden=hidden, weight=weight, bias=bias)
    is_matrix = hidden.dim() == 2 and hidden.shape[1] > 0
    checks.require(is_matrix, op, "hidden", "be [N, D], D > 0", list(hidden.shape))
    checks.require_no_dtensor(op, weight=weight, bias=bias)
    d = hidden.shape[1]
    matches = weight.dim() == 2 and weight.shape[0] > 0 and weight.shape[1] == d
    expected = "be [V, {}], V > 0 (a shard of FSDP or ZeRO-3? call the op inside the head module's forward)"
    checks.require(matches, op, "weight", expected, list(weight.shape), d)
    if bias is not None:
        checks.require(tuple(bias.shape) == (len(weight),), op, "bias", "be [{}]", list(bias.shape), len(weight))
    checks.require_targets(op, targets, hidden.shape[:1])
    checks.require_same_device(op, hidden=hidden, weight=weight, bias=bias, targets=targets)
    checks.require_bytes(op, memory_budget=memory_budget)
