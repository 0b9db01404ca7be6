"""Log-probabilities from hidden states and the head's weight, without `[N, V]` logits.

Dimensions: N scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph as _retains_graph

from ... import checks
from .. import memory
from ..devices import accumulation_dtype, is_traced, is_transformed, memory_of
from ..second_derivatives import gradients_of_definition
from . import definitions
from .logit_rows import GradientInputs, empty_gradients
from .passes import HEAD, Head, TileFormat
from .results import TokenLogps, Transform, named_results, requested_statistics, statistic_names
from .row_warps import OP

MEMORY_BUDGET = 512 << 20
"""The least default, and the default on devices other than GPUs."""
GPU_SHARE = 16
"""On a GPU, the default is this part of its memory."""


@torch.library.custom_op(
    "fastdpo::linear_logps_fwd",
    mutates_args=(),
    schema=f"(str statistics, SymInt keep, bool form_jacobian, {HEAD}) -> Tensor[]",
)
def linear_logps_fwd(statistics: str, keep: int, form_jacobian: bool, *head: Any) -> list[Tensor]:
    """The forward (see `Head.forward`)."""
    return Head(*head).forward(statistics, keep, form_jacobian)


@linear_logps_fwd.register_fake
def _(statistics, keep, form_jacobian, *head):
    return Head(*head).empty_outputs(statistics, keep, form_jacobian)


@torch.library.custom_op(
    "fastdpo::linear_logps_bwd",
    mutates_args=(),
    schema="(Tensor? grad_logps, Tensor? grad_entropy, Tensor kept, Tensor jacobian, Tensor[] sums, bool[] needs, "
    f"{HEAD}) -> (Tensor, Tensor, Tensor)",
)
def linear_logps_bwd(
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    kept: Tensor,
    jacobian: Tensor,
    sums: Sequence[Tensor],
    needs: Sequence[bool],
    *head: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward (see `Head.backward`)."""
    inputs = GradientInputs(*sums, grad_logps=grad_logps, grad_entropy=grad_entropy)
    return Head(*head).backward(inputs, kept, jacobian, needs)


@linear_logps_bwd.register_fake
def _(grad_logps, grad_entropy, kept, jacobian, sums, needs, hidden, weight, bias, *head):
    return empty_gradients(hidden, weight, bias, needs)


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, compute_dtype, statistics, keep, form_jacobian):
        ctx.set_materialize_grads(False)
        forward = linear_logps_fwd if is_traced() else linear_logps_fwd._init_fn  # which takes less time
        head = (hidden, weight, bias, targets, *transform, compute_dtype)
        kept, jacobian, logps, shift, others, total, *extra = forward(statistics, keep, form_jacobian, *head)
        ctx.kept, saved = (None, kept) if torch.compiler.is_compiling() else (kept, None)
        ctx.save_for_backward(hidden, weight, bias, targets, saved, jacobian, shift, others, total)
        ctx.transform, ctx.compute_dtype = transform, compute_dtype
        ctx.has_entropy = "entropy" in statistic_names(statistics)
        ctx.mark_non_differentiable(*extra[ctx.has_entropy :])
        return (logps, *extra)

    @staticmethod
    def backward(ctx, grad_logps, *grad_extra):
        hidden, weight, bias, targets, kept, jacobian, *sums = ctx.saved_tensors
        kept, others = _take_kept(ctx) if kept is None else kept, [None] * (len(ctx.needs_input_grad) - 3)
        grad_entropy = grad_extra[0] if ctx.has_entropy else None
        if grad_logps is None and grad_entropy is None:
            return (None, None, None, *others)
        needs = ctx.needs_input_grad[:3]
        if is_transformed() or (torch.is_grad_enabled() and not is_traced()):
            statistics = "entropy" if ctx.has_entropy else ""
            define = functools.partial(_defined, targets, ctx.transform, ctx.compute_dtype, statistics)
            inputs, upstream = (hidden, weight, bias), (grad_logps, grad_entropy)
            return *gradients_of_definition(define, inputs, needs, upstream), *others
        given = (grad_logps, grad_entropy, kept, jacobian, sums, needs)
        backward = linear_logps_bwd if is_traced() else linear_logps_bwd._init_fn
        grads = backward(*given, hidden, weight, bias, targets, *ctx.transform, ctx.compute_dtype)
        return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *others


def _take_kept(ctx: Any) -> Tensor:
    """The gradient tiles that the forward kept. They are freed unless the graph is retained.

    Autograd does not save them, so hooks on saved tensors do not move them to the host with the activations. Compiled
    autograd would lose them, so compiled calls save them.
    """
    kept = ctx.kept
    if not _retains_graph():
        ctx.kept = None
    return kept


def _defined(
    targets: Tensor,
    transform: Transform,
    compute_dtype: torch.dtype,
    statistics: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> TokenLogps:
    """The results by the op's definition, in the dtype of its sums."""
    wide = accumulation_dtype(compute_dtype)
    bias = None if bias is None else bias.to(wide)
    given = {**transform._asdict(), "bias": bias, "outputs": statistic_names(statistics)}
    return definitions.linear_logps(hidden.to(wide), weight.to(wide), targets, **given)


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
) -> TokenLogps:
    """Log-probability of each target under the softmax of a head's transformed logits.

    The distribution is `softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)`.

    Defined by `fastdpo.ops.definitions.linear_logps`.

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

    Returns:
        `TokenLogps` with fields [N].

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    _check_head(hidden, weight, targets, bias, memory_budget)
    checks.require_transform(OP, softcap, logit_scale, temperature)
    statistics, compute_dtype = requested_statistics(OP, outputs), _compute_dtype(hidden)
    transform = Transform(softcap, logit_scale, temperature)
    if is_transformed():
        return _defined(targets, transform, compute_dtype, statistics, hidden, weight, bias)

    grad_enabled = torch.is_grad_enabled()
    trains_head = grad_enabled and (weight.requires_grad or (bias is not None and bias.requires_grad))
    form_jacobian = grad_enabled and hidden.requires_grad and not trains_head
    trained = weight.numel() if weight.requires_grad else 0
    device_memory = memory_of(weight.device)
    budget = budget_for(trained, device_memory) if memory_budget is None else memory_budget
    keep = 0
    if trains_head:
        if memory_budget is None and device_memory is not None:  # of a device that is nearly full, what is left of it
            budget = int(min(budget, max(memory.left(weight.device), MEMORY_BUDGET)))
        format = TileFormat.of(weight, compute_dtype, transform, bias is not None)
        keep = format.rows_within(len(hidden), budget)
        if device_memory is not None and not is_traced():
            memory.hold(weight.device, "gradient tiles", format.bytes_of(keep), f"of {keep:,} scored tokens")

    logps, *extra = _LinearLogps.apply(
        hidden, weight, bias, targets, transform, compute_dtype, statistics, keep, form_jacobian
    )
    return named_results(logps, extra, statistics, targets.shape)


def budget_for(trained: int, device_memory: int | None) -> int:
    """The default for a head with this many trained elements of its weight.

    Tiles that are not kept are computed again one by one, and each of these products reads and
    writes the weight's gradient in float32. A budget below the size of that gradient would save
    little of the memory that the backward needs anyway, so twice its size is kept at least.

    Args:
        trained: elements of the weight, 0 if it needs no gradient.
        device_memory: bytes of the GPU, or None for another device.
    """
    if device_memory is None:
        return MEMORY_BUDGET
    gradient = 4 * trained  # float32
    return max(MEMORY_BUDGET, device_memory // GPU_SHARE, 2 * gradient)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which a head multiplies: that of `hidden`, or autocast's."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else hidden.dtype


def _check_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, memory_budget: int | None
) -> None:
    checks.require_tensors(OP, hidden=hidden, weight=weight, targets=targets)
    checks.require_tensors_or_none(OP, bias=bias)
    checks.require_values(OP, hidden=hidden)
    checks.require_floating(OP, hidden=hidden, weight=weight, bias=bias)
    is_matrix = hidden.dim() == 2 and hidden.shape[1] > 0
    checks.require(is_matrix, OP, "hidden", "be [N, D], D > 0", list(hidden.shape))
    checks.require_no_dtensor(OP, hidden=hidden, weight=weight, bias=bias, targets=targets)
    d = hidden.shape[1]
    matches = weight.dim() == 2 and weight.shape[0] > 0 and weight.shape[1] == d
    expected = "be [V, {}], V > 0 (a shard of FSDP or ZeRO-3? call the op inside the head module's forward)"
    checks.require(matches, OP, "weight", expected, list(weight.shape), d)
    if bias is not None:
        checks.require(tuple(bias.shape) == (len(weight),), OP, "bias", "be [{}]", list(bias.shape), len(weight))
    checks.require_targets(OP, targets, hidden.shape[:1])
    checks.require_same_device(OP, hidden=hidden, weight=weight, bias=bias, targets=targets)
    checks.require_bytes_or_none(OP, "memory_budget", memory_budget)
