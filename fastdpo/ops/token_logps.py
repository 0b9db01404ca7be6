"""Log-probabilities of given logits at their targets, without the `[N, V]` log-softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..packing import IGNORE_INDEX
from . import checks
from .devices import is_host, suits_triton
from .logit_rows import BlockSums, RowSums, Transform, accumulator, blocks, conclude, fold, logit_gradient
from .results import TokenLogps

OP = "token_logps"


@torch.library.custom_op("fastdpo::token_logps_fwd", mutates_args=())
def _fwd(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    statistics: str,
) -> list[Tensor]:
    """logps, shift, others, total, then the statistics; each [N]."""
    transform = Transform(softcap, logit_scale, temperature)
    if _takes_kernels(logits):
        from ..kernels.token_logps import token_logps_fwd

        return token_logps_fwd(logits, targets, *transform, statistics)
    dtype = accumulator(logits.dtype)
    ignored, unknown, index = split_targets(OP, targets, logits.shape[1])
    parts = []
    for rows in blocks(len(logits), logits.shape[1], dtype, logits.device):
        z = transform.apply_(logits[rows].to(dtype, copy=True))
        own = z.gather(1, index[rows, None])[:, 0].masked_fill_(unknown[rows], torch.nan)
        parts.append(fold(z, index[rows], own, statistics)[0])
        del z  # before the next tile is made
    return results_of(parts, logits, ignored, statistics)


@_fwd.register_fake
def _(logits, targets, softcap, logit_scale, temperature, statistics):
    return empty_results(logits, statistics)


def _write_gradient(
    grad: Tensor,
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    sums: Sequence[Tensor],
    transform: Transform,
) -> None:
    """Fills grad [N, V], which may be the logits."""
    if _takes_kernels(logits):
        from ..kernels.token_logps import token_logps_bwd

        token_logps_bwd(grad, grad_logps, grad_entropy, logits, targets, sums, *transform)
        return
    dtype = accumulator(logits.dtype)
    ignored, _, index = split_targets(OP, targets, logits.shape[1])
    for rows in blocks(len(logits), logits.shape[1], dtype, logits.device):
        z = transform.apply_(logits[rows].to(dtype, copy=True))
        of_logps, of_entropy = (None if g is None else g[rows].to(dtype) for g in (grad_logps, grad_entropy))
        own_sums = RowSums(*(x[rows] for x in sums))
        tile = logit_gradient(z, index[rows], own_sums, of_logps, of_entropy, transform)
        grad[rows] = tile.masked_fill_(ignored[rows, None], 0)
        del z, tile  # before the next ones are made


@torch.library.custom_op("fastdpo::token_logps_bwd", mutates_args=())
def _bwd(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    sums: Sequence[Tensor],
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> Tensor:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    transform = Transform(softcap, logit_scale, temperature)
    _write_gradient(grad, grad_logps, grad_entropy, logits, targets, sums, transform)
    return grad


@_bwd.register_fake
def _(grad_logps, grad_entropy, logits, targets, sums, softcap, logit_scale, temperature):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("fastdpo::token_logps_bwd_", mutates_args=("logits",))
def _bwd_(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    sums: Sequence[Tensor],
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> None:
    """The gradient in the place of the logits."""
    transform = Transform(softcap, logit_scale, temperature)
    _write_gradient(logits, grad_logps, grad_entropy, logits, targets, sums, transform)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, softcap, logit_scale, temperature, statistics, inplace_backward):
        ctx.set_materialize_grads(False)
        logps, shift, others, total, *extra = _fwd(logits, targets, softcap, logit_scale, temperature, statistics)
        ctx.save_for_backward(logits, targets, logps, shift, others, total)
        ctx.transform, ctx.inplace = (softcap, logit_scale, temperature), inplace_backward
        ctx.entropy = bool(extra) and "entropy" in statistics
        ctx.mark_non_differentiable(*extra[ctx.entropy :])
        return (logps, *extra)

    @staticmethod
    def backward(ctx, grad_logps, *grad_extra):
        if grad_logps is None and (not ctx.entropy or grad_extra[0] is None):
            return (None,) * 7
        logits, targets, *sums = ctx.saved_tensors
        arguments = (grad_logps, grad_extra[0] if ctx.entropy else None, logits, targets, sums, *ctx.transform)
        if ctx.inplace:
            _bwd_(*arguments)
            return logits, *[None] * 6
        return _bwd(*arguments), *[None] * 6


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
    """Log-probability of each target under `softmax(z)`, with `z = cap(logit_scale * logits) / temperature`.

    Sums are float32 (float64 for float64 logits), whatever the dtype of the logits, and leave the target out, so that
    `1 - p` of a confident prediction keeps its digits. Meaning: `fastdpo.ops.reference.token_logps`.

    Extra memory: two blocks of logits in float32, each of at most 8 MiB on a CPU, elsewhere 64 MiB or 256 tokens (one
    more with `softcap`, one more in the backward if a gradient reaches `entropy`), none on CUDA; in the backward also
    the gradient, as large as the logits, if it does not take their place. Logits that are no view of `[N, V]` rows,
    such as `logits[:, :-1]` of a batch, are copied.

    Args:
        logits: [..., V] float16, bfloat16, float32 or float64.
        targets: [...] int32 or int64 ids below V. Where it is -100 every result and the gradient are exactly zero.
            Any other id raises on a CPU. On other devices, where that check would cost a synchronisation, it makes
            `logps` and `entropy` of its token NaN, and its gradient too, unless the one from above is zero.
        softcap: the bound of Gemma 2's `softcap * tanh(x / softcap)` (arXiv 2408.00118, section 2), or None.
        logit_scale: multiplies the logits before the cap.
        temperature: divides them after it.
        outputs: names of the fields of `TokenLogps` to fill; `logps` always is.
        inplace_backward: write the gradient over the logits. Nothing else may need them by then: not another op's
            backward, which autograd detects, nor the caller, which it does not.

    Returns:
        `TokenLogps` with fields of the shape of targets.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
    """
    checks.require_floating(OP, logits=logits)
    checks.require(logits.dim() > 0 and logits.shape[-1] > 0, OP, "logits", "be [..., V], V > 0", list(logits.shape))
    checks.require_targets(OP, targets, logits.shape[:-1])
    checks.require_same_device(OP, logits=logits, targets=targets)
    checks.require_transform(OP, softcap, temperature)
    statistics = checks.requested(OP, outputs)
    rows = logits.reshape(-1, logits.shape[-1])
    if inplace_backward:
        checks.require_own_places(OP, "logits", rows, "inplace_backward")
    options = (softcap, logit_scale, temperature, statistics, inplace_backward)
    logps, *extra = _TokenLogps.apply(rows, targets.reshape(-1), *options)
    return named_results(logps, extra, statistics, targets.shape)


def _takes_kernels(logits: Tensor) -> bool:
    return suits_triton(logits.device, logits.dtype) and logits.stride(-1) == 1


def split_targets(op: str, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which targets are ignored, which are outside the vocabulary, and ids to gather with, 0 for both.

    Raises:
        ValueError: on a CPU, some are outside the vocabulary.
    """
    ignored = targets == IGNORE_INDEX
    index = targets.long().masked_fill(ignored, 0)
    if is_host(index.device) and len(index):  # elsewhere the check would cost a synchronisation
        low, high = (int(bound) for bound in index.aminmax())
        checks.require(low >= 0, op, "targets", "be -100 or ids below {}", low, vocabulary)
        checks.require(high < vocabulary, op, "targets", "be -100 or ids below {}", high, vocabulary)
    unknown = (index < 0) | (index >= vocabulary)
    return ignored, unknown, index.masked_fill(unknown, 0)


def empty_results(rows: Tensor, statistics: str) -> list[Tensor]:
    """Room for logps, the three sums and the statistics of `rows.shape[0]` tokens."""
    dtype = accumulator(rows.dtype)
    names = [name for name in statistics.split(",") if name]
    dtypes = [dtype] * 4 + [torch.bool if name == "is_top1" else dtype for name in names]
    return [torch.empty(rows.shape[0], dtype=dtype, device=rows.device) for dtype in dtypes]


def results_of(parts: Sequence[BlockSums], rows: Tensor, ignored: Tensor, statistics: str) -> list[Tensor]:
    """Of blocks that make up the tokens of `rows`: logps, the three sums and the statistics, 0 where ignored."""
    if not parts:
        return empty_results(rows, statistics)
    (logps, *sums), extra = conclude(BlockSums.join(parts))
    return [logps.masked_fill_(ignored, 0), *sums, *(x.masked_fill_(ignored, 0) for x in extra)]


def named_results(logps: Tensor, extra: Sequence[Tensor], statistics: str, shape: Sequence[int]) -> TokenLogps:
    names = [name for name in statistics.split(",") if name]
    fields = {name: value.reshape(shape) for name, value in zip(names, extra, strict=True)}
    return TokenLogps(logps=logps.reshape(shape), **fields)
