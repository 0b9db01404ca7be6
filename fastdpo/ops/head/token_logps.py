"""Log-probabilities of given logits at their targets, without a log-softmax of shape `[N, V]`.

Dimensions: N scored tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import checks
from ..choice.verdicts import Kernel, works
from ..devices import accumulation_dtype, is_transformed, suits_triton
from ..second_derivatives import gradients_of_definition
from . import definitions, trials
from .logit_rows import GradientInputs, block_slices, logit_gradient, results_in_torch
from .results import Targets, TokenLogps, Transform, empty_results, named_results, requested_statistics, statistic_names

OP = "token_logps"

TRANSFORM = "float? softcap, float logit_scale, float temperature"
BACKWARD = f"Tensor targets, Tensor[] sums, {TRANSFORM}"


@torch.library.custom_op(
    "fastdpo::token_logps_fwd",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor targets, {TRANSFORM}, str statistics) -> Tensor[]",
)
def token_logps_fwd(logits: Tensor, targets: Tensor, *options: Any) -> list[Tensor]:
    """logps, shift, others, total and the statistics, [N] each."""
    *transform, statistics = options
    transform = Transform(*transform)
    if takes_kernels(logits):
        from ...kernels import token_logps as kernels

        return kernels.token_logps_fwd(logits, targets, *transform, statistics)
    return results_in_torch(logits, Targets.of(OP, targets, logits.shape[1]), statistics, transform)


@token_logps_fwd.register_fake
def _(logits, targets, *options):
    return empty_results(logits, options[-1])


@torch.library.custom_op(
    "fastdpo::token_logps_bwd",
    mutates_args=(),
    schema=f"(Tensor? grad_logps, Tensor? grad_entropy, Tensor logits, {BACKWARD}) -> Tensor",
)
def token_logps_bwd(grad_logps: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *rest: Any) -> Tensor:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(grad, grad_logps, grad_entropy, logits, *rest)
    return grad


@token_logps_bwd.register_fake
def _(grad_logps, grad_entropy, logits, *rest):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "fastdpo::token_logps_bwd_",
    mutates_args=("logits",),
    schema=f"(Tensor? grad_logps, Tensor? grad_entropy, Tensor(a2!) logits, {BACKWARD}) -> ()",
)
def token_logps_bwd_(grad_logps: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *rest: Any) -> None:
    """Overwrites the logits with their gradient."""
    _write_gradient(logits, grad_logps, grad_entropy, logits, *rest)


def _write_gradient(
    grad: Tensor,
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    sums: Sequence[Tensor],
    *options: Any,
) -> None:
    """Writes `d loss / d logits` to grad [N, V], which may be the logits themselves."""
    transform = Transform(*options)
    if grad_logps is None and grad_entropy is None:
        grad.zero_()
        return
    if takes_kernels(logits):
        from ...kernels import token_logps as kernels

        kernels.token_logps_bwd(grad, grad_logps, grad_entropy, logits, targets, sums, *transform)
        return
    dtype = accumulation_dtype(logits.dtype)
    upstream = (None if g is None else g.to(dtype) for g in (grad_logps, grad_entropy))
    inputs = GradientInputs(*sums, *upstream)
    columns = Targets.of(OP, targets, logits.shape[1])
    for rows in block_slices(logits, dtype):
        z, of_rows = transform.apply_(logits[rows].to(dtype, copy=True)), columns.of_rows(rows)
        block = logit_gradient(z, of_rows, inputs.of_rows(rows), transform)
        grad[rows] = block.masked_fill_(of_rows.ignored[:, None], 0)
        del z, block  # frees the block before the next one is allocated


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, transform, statistics, inplace_backward):
        ctx.set_materialize_grads(False)
        logps, shift, others, total, *extra = token_logps_fwd(logits, targets, *transform, statistics)
        ctx.save_for_backward(logits, targets, shift, others, total)
        ctx.transform, ctx.inplace, ctx.overwritten = transform, inplace_backward, False
        ctx.has_entropy = "entropy" in statistic_names(statistics)
        ctx.mark_non_differentiable(*extra[ctx.has_entropy :])
        return (logps, *extra)

    @staticmethod
    def backward(ctx, grad_logps, *grad_extra):
        upstream, others = (grad_logps, grad_extra[0] if ctx.has_entropy else None), [None] * 4
        if all(x is None for x in upstream):
            return None, *others
        if is_transformed() or (torch.is_grad_enabled() and not torch.compiler.is_compiling()):
            logits, targets, *_ = ctx.saved_tensors
            given = {**ctx.transform._asdict(), "outputs": ("logps", "entropy")[: 1 + ctx.has_entropy]}
            define = functools.partial(definitions.token_logps, targets=targets, **given)
            return *gradients_of_definition(define, [logits], [True], upstream), *others
        if ctx.inplace and not torch.compiler.is_compiling():
            got = "True, and the first one has overwritten the logits"
            checks.require(not ctx.overwritten, OP, "inplace_backward", "be False for a second backward", got)
            ctx.overwritten = True
        logits, targets, *sums = ctx.saved_tensors
        arguments = (*upstream, logits, targets, sums, *ctx.transform)
        if ctx.inplace:
            token_logps_bwd_(*arguments)
            return logits, *others
        return token_logps_bwd(*arguments), *others


def token_logps(
    logits: Tensor,
    targets: Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logps",),
    inplace_backward: bool = False,
) -> TokenLogps:
    """Log-probability of each target under the softmax of transformed logits.

    The distribution is `softmax(cap(logit_scale * logits) / temperature)`.

    Defined by `fastdpo.ops.definitions.token_logps`.

    Sums are float32 (float64 for float64 logits), whatever the dtype of the logits. They leave the
    target out, so `1 - p` of a confident prediction keeps its digits.

    Memory in addition to the results: none on CUDA. Elsewhere, two blocks of logits in float32
    (three with `softcap`, and one more in the backward if a gradient reaches `entropy`), each of at
    most 8 MiB on a CPU and of at most 64 MiB or 256 tokens on other devices. The backward also
    allocates the gradient, as large as the logits, unless `inplace_backward` is set. Logits that
    are not a view of `[N, V]` rows, such as `logits[:, :-1]` of a batch, are copied.

    Args:
        logits: [..., V] float16, bfloat16, float32 or float64.
        targets: [...] int32 or int64 ids below V. Where the target is -100, every result and the
            gradient are exactly zero. Any other id raises on a CPU. On other devices, where that
            check would synchronize with the host, `logps` and `entropy` of the token become NaN,
            and so does its gradient unless the upstream gradient is zero.
        softcap: the bound of Gemma 2's `softcap * tanh(x / softcap)` (arXiv 2408.00118, section 2),
            or None.
        logit_scale: multiplies the logits before the softcap.
        temperature: divides the logits after the softcap.
        outputs: names of the fields of `TokenLogps` to fill. `logps` is always filled.
        inplace_backward: overwrite the logits with their gradient in the backward. Nothing else may
            need the logits by then. Autograd detects if the backward of another op does; it does
            not detect other uses by the caller.

    Returns:
        `TokenLogps` with fields of the shape of targets.

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument. In the backward,
            if it has overwritten the logits before.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    checks.require_tensors(OP, logits=logits, targets=targets)
    checks.require_no_dtensor(OP, logits=logits, targets=targets)
    checks.require_flags(OP, inplace_backward=inplace_backward)
    checks.require_floating(OP, logits=logits)
    checks.require(logits.dim() > 0 and logits.shape[-1] > 0, OP, "logits", "be [..., V], V > 0", list(logits.shape))
    checks.require_targets(OP, targets, logits.shape[:-1])
    checks.require_same_device(OP, logits=logits, targets=targets)
    checks.require_transform(OP, softcap, logit_scale, temperature)
    statistics, transform = requested_statistics(OP, outputs), Transform(softcap, logit_scale, temperature)
    if is_transformed():
        return definitions.token_logps(logits, targets, **transform._asdict(), outputs=statistic_names(statistics))
    rows = logits.reshape(-1, logits.shape[-1])
    if inplace_backward:
        checks.require_distinct_memory(OP, "logits", rows, "inplace_backward overwrites them")
    logps, *extra = _TokenLogps.apply(rows, targets.reshape(-1), transform, statistics, inplace_backward)
    return named_results(logps, extra, statistics, targets.shape)


def takes_kernels(logits: Tensor) -> bool:
    """Whether kernels take logits as they are given to this op, and gradients of their entropy."""
    device, dtype = logits.device, logits.dtype
    if not suits_triton(device, dtype) or logits.stride(-1) != 1:
        return False
    return works(Kernel(OP, device, dtype), trials.token_logps)
