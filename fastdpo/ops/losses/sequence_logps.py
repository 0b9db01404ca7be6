"""Sums of token log-probabilities per sequence, the input of preference losses.

Dimensions: B padded rows of length L, T packed tokens, S sequences, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...packing import IGNORE_INDEX
from ..devices import is_host, is_transformed
from ..head.linear_logps import linear_logps
from ..head.results import SequenceLogps
from ..head.token_logps import token_logps


@torch.library.custom_op("fastdpo::segment_sums_fwd", mutates_args=())
def _fwd(values: Tensor, cu_seqlens: Tensor, op: str) -> Tensor:
    _require_order(op, cu_seqlens, len(values))  # here, where compiled calls make the check, too
    sums = torch.segment_reduce(values.double(), "sum", lengths=cu_seqlens.diff(), unsafe=True, initial=0)
    return sums.to(values.dtype)


@_fwd.register_fake
def _(values, cu_seqlens, op):
    return values.new_empty(cu_seqlens.shape[0] - 1)


@torch.library.custom_op("fastdpo::segment_sums_bwd", mutates_args=())
def _bwd(grad: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    return grad.repeat_interleave(cu_seqlens.diff(), output_size=tokens)


@_bwd.register_fake
def _(grad, cu_seqlens, tokens):
    return grad.new_empty(tokens)


def _save(ctx, inputs, output):
    values, cu_seqlens, _ = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.tokens = values.shape[0]


_fwd.register_autograd(lambda ctx, grad: (_bwd(grad, *ctx.saved_tensors, ctx.tokens), None, None), setup_context=_save)
_bwd.register_autograd(
    lambda ctx, grad: (_fwd(grad, *ctx.saved_tensors, "segment_sums"), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def segment_sums(values: Tensor, cu_seqlens: Tensor, op: str) -> Tensor:
    """Sums [S] of values [N], in float64 and in a fixed order, unless torch.func transforms them."""
    if not is_transformed():
        return _fwd(values, cu_seqlens, op)
    if not torch.compiler.is_compiling():
        _require_order(op, cu_seqlens, len(values))
    lengths = cu_seqlens.diff()
    index = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    return values.new_zeros(len(lengths)).index_add(0, index, values)


def sequence_logps(
    logits: Tensor,
    targets: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> SequenceLogps:
    """Summed log-probability of each sequence's targets, from logits.

    Defined by `fastdpo.ops.definitions.sequence_logps`. Sums over tokens are taken in float64. Memory
    is that of `token_logps`.

    Args:
        logits: [B, L, V] for padded sequences, or [T, V] for packed ones; floating point.
        targets: [B, L] or [T] int32 or int64 ids, -100 where nothing is scored (prompts, padding).
        cu_seqlens: int32 or int64 [S + 1], for packed sequences: the start of each, and T. None for
            padded sequences.
        softcap, logit_scale, temperature: as in `token_logps`.

    Returns:
        `SequenceLogps` with fields [B] or [S].

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    op = "sequence_logps"
    checks.require_tensors(op, logits=logits, targets=targets)
    checks.require_tensors_or_none(op, cu_seqlens=cu_seqlens)
    if cu_seqlens is None:
        checks.require(logits.dim() == 3, op, "logits", "be [B, L, V] without cu_seqlens", list(logits.shape))
        cu_seqlens = torch.arange(logits.shape[0] + 1, device=logits.device) * logits.shape[1]
    else:
        checks.require(logits.dim() == 2, op, "logits", "be [T, V] with cu_seqlens", list(logits.shape))
    logps = token_logps(logits, targets, softcap=softcap, logit_scale=logit_scale, temperature=temperature).logps
    return _sums(op, logps, targets, cu_seqlens)


def linear_sequence_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    cu_seqlens: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    memory_budget: int | None = None,
) -> SequenceLogps:
    """Summed log-probability of each sequence's targets, from hidden states and the head's weight.

    Defined by `fastdpo.ops.definitions.linear_sequence_logps`. Sums over tokens are taken in float64.
    Cost and memory are those of `linear_logps`.

    Args:
        hidden: [T, D] for packed sequences, floating point.
        weight: [V, D].
        targets: [T] int32 or int64 ids, -100 where nothing is scored.
        cu_seqlens: int32 or int64 [S + 1], the start of each sequence, and T.
        bias, softcap, logit_scale, temperature, memory_budget: as in `linear_logps`.

    Returns:
        `SequenceLogps` with fields [S].

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    op = "linear_sequence_logps"
    checks.require_tensors(op, hidden=hidden, weight=weight, targets=targets, cu_seqlens=cu_seqlens)
    head: Any = dict(bias=bias, softcap=softcap, logit_scale=logit_scale, temperature=temperature)
    logps = linear_logps(hidden, weight, targets, memory_budget=memory_budget, **head).logps
    return _sums(op, logps, targets, cu_seqlens)


def _sums(op: str, logps: Tensor, targets: Tensor, cu_seqlens: Tensor) -> SequenceLogps:
    checks.require_same_device(op, targets=targets, cu_seqlens=cu_seqlens)
    checks.require_ints(op, cu_seqlens=cu_seqlens)
    are_bounds = cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 0
    checks.require(are_bounds, op, "cu_seqlens", "be [S + 1]", list(cu_seqlens.shape))
    bounds = cu_seqlens.long()
    return SequenceLogps(segment_sums(logps.reshape(-1), bounds, op), _target_counts(targets, bounds))


def _require_order(op: str, cu_seqlens: Tensor, tokens: int) -> None:
    """Requires that bounds [S + 1] are those of `tokens` tokens in total."""
    if is_host(cu_seqlens.device):  # elsewhere this check would synchronize
        ordered = cu_seqlens[0] == 0 and cu_seqlens[-1] == tokens and bool((cu_seqlens.diff() >= 0).all())
        checks.require(bool(ordered), op, "cu_seqlens", "increase from 0 to {}", cu_seqlens.tolist(), tokens)


def _target_counts(targets: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64 [S], the number of targets of each sequence that are not -100."""
    scored = (targets != IGNORE_INDEX).reshape(-1)
    return torch.nn.functional.pad(scored.long().cumsum(0), (1, 0))[cu_seqlens].diff()
