"""The loss of preference pairs from hidden states and the head's weight, in one visit to each pair.

Dimensions: P pairs, N scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks
from ..devices import accumulation_dtype
from ..head.linear_logps import MEMORY_BUDGET, check_head, compute_dtype_of, default_budget
from ..head.logit_rows import GradientInputs
from ..head.passes import backward_pass, forward_pass, take_kept
from ..head.results import Targets, TokenLogps, empty_results, named_results, requested_statistics
from ..head.tiles import HEAD, HeadCall, TileFormat
from .objectives import DPO, SORTED, PreferenceObjective, require_objective
from .preference_loss import PreferenceLoss, loss_dtype, loss_inputs, preference_loss
from .sequence_logps import require_bounds, segment_sums, target_counts
from .slopes import loss_slopes

OP = "linear_preference_loss"

PAIRS = "Tensor cu_seqlens, Tensor ref_chosen_logps, Tensor ref_rejected_logps, Tensor? weights"
OBJECTIVE = (
    "str loss_type, float[]? loss_weights, float beta, float label_smoothing, str f_divergence_type, "
    "float f_alpha_divergence_coef, float discopop_tau, float simpo_gamma"
)


class LinearPreferenceLoss(NamedTuple):
    """The loss of preference pairs, and the log-probabilities that it was computed from. Only the
    scalar `loss` is differentiable.

    Attributes:
        pairs: the losses and rewards, [P].
        chosen_logps, rejected_logps: [P] the summed log-probabilities, in nats.
        tokens: the log-probabilities and statistics of the tokens, [N].
    """

    pairs: PreferenceLoss
    chosen_logps: Tensor
    rejected_logps: Tensor
    tokens: TokenLogps

    @property
    def loss(self) -> Tensor:
        """The mean loss of the pairs, a scalar."""
        return self.pairs.loss


@torch.library.custom_op(
    f"fastdpo::{OP}",
    mutates_args=(),
    schema=f"({HEAD}, {PAIRS}, {OBJECTIVE}, str statistics, bool[] needs, SymInt chunk_bytes, SymInt memory_budget) "
    "-> Tensor[]",
)
def _fwd(*args: Any) -> list[Tensor]:
    """The loss, and its gradients. Chunks of pairs are scored and differentiated one after the other.

    Returns:
        Gradients of hidden, weight and bias in the dtype of sums, without elements where not
        needed; the fields of `PreferenceLoss`; chosen_logps and rejected_logps; logps and
        statistics of the tokens.
    """
    call, (cu_seqlens, *references, weights), objective = HeadCall(*args[:8]), args[8:12], args[12:20]
    statistics, needs, chunk_bytes, memory_budget = args[20:]
    call, wide = call._replace(weight=call.weight.to(call.compute_dtype)), accumulation_dtype(call.compute_dtype)
    objective = PreferenceObjective(objective[0].split(","), *objective[1:])
    n_pairs, bounds, device = len(references[0]), cu_seqlens.tolist(), call.targets.device
    Targets.of(OP, call.targets, len(call.weight))  # names this op where a target is unknown
    lengths = target_counts(call.targets, cu_seqlens.to(device)).chunk(2)
    dtype = loss_dtype(call.hidden, *references, weights)
    grad_hidden, grad_weight, grad_bias = gradients = _zero_gradients(call, needs)
    needs_hidden, needs_weight, needs_bias = needs
    tokens = _empty_tokens(call.hidden, statistics)
    # Pairs that are not scored yet have the reference's log-probabilities. No loss of a pair depends on them.
    logps = [x.to(accumulation_dtype(call.hidden.dtype), copy=True) for x in references]
    format, capacity = TileFormat.of(call.weight, call.compute_dtype), None
    if needs_weight or needs_bias:
        capacity = max(chunk_bytes // (format.columns * format.dtype.itemsize), format.rows)

    def visit(chunk: slice) -> None:
        """Fills the results and gradients of a chunk of pairs, and frees its tiles."""
        spans = [(bounds[chunk.start + i], bounds[chunk.stop + i]) for i in (0, n_pairs)]
        index = torch.cat([torch.arange(*span, device=device) for span in spans])  # of the chunk's tokens
        counts = cu_seqlens.diff().view(2, n_pairs)[:, chunk].flatten().to(device)
        # The inputs are wide, so that gradients are, which are rounded after they have met the upstream gradient.
        hidden, bias = call.hidden[index].to(wide), None if call.bias is None else call.bias.to(wide)
        part, n, keep = call._replace(hidden=hidden, bias=bias, targets=call.targets[index]), len(index), 0
        if capacity is not None:
            keep = n if n <= format.rows else format.rows_within(n, memory_budget)
        kept, jacobian, *results = forward_pass(part, statistics, keep, needs_hidden and capacity is None)
        sums = results[1:4]
        for of_all, values in zip(tokens, (results[0], *results[4:]), strict=True):
            of_all[index] = values
        of_sequences = segment_sums(results[0], F.pad(counts.cumsum(0), (1, 0)))
        for of_all, values in zip(logps, of_sequences.chunk(2), strict=True):
            of_all[chunk] = values
        if not any(needs):
            return

        pairs: list[Any] = [*logps, *references, *lengths]
        slopes = loss_slopes(loss_inputs(dtype, objective, *pairs), objective)
        of_pairs = torch.cat([(x if weights is None else x * weights)[chunk] for x in slopes]) / n_pairs
        upstream = of_pairs.repeat_interleave(counts, output_size=n)
        of_part, main_grad = [needs_hidden, False, needs_bias], grad_weight if needs_weight else None
        found = backward_pass(part, GradientInputs(*sums, grad_logps=upstream), kept, jacobian, of_part, main_grad)
        if needs_hidden:
            grad_hidden[index] = found[0]
        if needs_bias:
            grad_bias.add_(found[2])

    with torch.autocast(call.hidden.device.type, enabled=False):
        for chunk in _chunks(bounds, n_pairs, capacity):
            visit(chunk)
        options: Any = dict(
            chosen_lengths=lengths[0], rejected_lengths=lengths[1], weights=weights, objective=objective
        )
        return [*gradients, *preference_loss(*logps, *references, **options), *logps, *tokens]


@_fwd.register_fake
def _(*args):
    call, references, (statistics, needs, _, _) = HeadCall(*args[:8]), args[9:12], args[20:]
    dtype = loss_dtype(call.hidden, *references)
    vectors = [torch.empty_like(references[0], dtype=dtype) for _ in range(3)]
    sums = [torch.empty_like(x, dtype=accumulation_dtype(call.hidden.dtype)) for x in vectors[:2]]
    gradients = [torch.empty_like(x) for x in _zero_gradients(call, needs)]
    return [*gradients, vectors[0].new_empty(()), *vectors, *sums, *_empty_tokens(call.hidden, statistics)]


def _chunks(bounds: Sequence[int], n_pairs: int, capacity: int | None) -> Iterator[slice]:
    """Slices of the pairs with up to `capacity` tokens, or of one pair with more."""
    start = size = 0
    for pair in range(n_pairs):
        tokens = sum(bounds[i + 1] - bounds[i] for i in (pair, n_pairs + pair))
        if capacity is not None and pair > start and size + tokens > capacity:
            yield slice(start, pair)
            start, size = pair, 0
        size += tokens
    yield slice(start, n_pairs)


def _zero_gradients(call: HeadCall, needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of hidden, weight and bias in the dtype of sums, without elements where not needed."""
    dtype = accumulation_dtype(call.compute_dtype)
    inputs = (call.hidden, call.weight, call.bias)
    return [
        call.hidden.new_zeros(x.shape if needed and x is not None else 0, dtype=dtype)
        for x, needed in zip(inputs, needs, strict=True)
    ]


def _empty_tokens(hidden: Tensor, statistics: str) -> list[Tensor]:
    """Uninitialized logps and statistics, [N] each."""
    logps, _, _, _, *extra = empty_results(hidden, statistics)
    return [logps, *extra]


class _LinearPreferenceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, *arguments):
        grad_hidden, grad_weight, grad_bias, *results = _fwd(hidden, weight, bias, *arguments)
        ctx.set_materialize_grads(False)
        ctx.kept = grad_hidden, grad_weight, grad_bias
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if torch.is_grad_enabled():
            raise RuntimeError(f"{OP}: has no second derivative")
        kept, is_reused = take_kept(ctx), ctx.kept is None
        if kept is None:
            raise RuntimeError(f"{OP}: the gradients were freed by an earlier backward without retain_graph=True")
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grad_loss is not None:
            for i, (x, dtype) in enumerate(zip(kept, ctx.dtypes, strict=True)):
                if ctx.needs_input_grad[i]:
                    out = x if is_reused and x.dtype == dtype else torch.empty_like(x, dtype=dtype)
                    gradients[i] = torch.mul(x, grad_loss, out=out)
        return tuple(gradients)


def linear_preference_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    cu_seqlens: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    objective: PreferenceObjective = DPO,
    *,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logps",),
    memory_budget: int | None = None,
) -> LinearPreferenceLoss:
    """Loss of preference pairs from hidden states and the head's weight, with its gradients.

    Equal to `preference_loss` of the sums of `linear_sequence_logps`.

    Defined by `fastdpo.ops.definitions.linear_preference_loss`.

    The loss of a pair depends on no other pair. Chunks of pairs are scored and differentiated one
    after the other, so each token's logits are computed once: three GEMMs over `[N, D] x [D, V]` if
    the head needs a gradient, however many tokens there are, two if only `hidden` does, and one
    without gradients. `linear_logps`, which must keep gradient tiles until the loss of all pairs is
    known, takes four for the tokens whose tiles exceed its budget.

    A chunk has as many pairs as have gradient tiles within `memory_budget`, and at least one. Of a
    pair that exceeds the budget alone, the tiles beyond it are recomputed, with four GEMMs. By
    default, a chunk has up to 512 MiB or one tile (see `linear_logps`), whichever is more, and a pair
    that exceeds this alone has the default budget of `linear_logps`.

    Memory in addition to results and gradients:

    - while the op runs, the gradient tiles of a chunk or one tile (see `linear_logps`), whichever is
      more, if the head needs a gradient; one tile otherwise;
    - from forward to backward, the gradients in float32: `[N, D]`, and `[V, D]` if the weight needs
      one. They are not saved tensors of autograd.

    Args:
        hidden: [N, D] float16, bfloat16, float32 or float64: the states that predict the targets.
            `hidden[layout.label_index]` for packed states of a `Layout`.
        weight: [V, D], cast to the compute dtype as in `linear_logps`.
        targets: [N] int32 or int64 ids, -100 where nothing is scored; `layout.labels`.
        cu_seqlens: int32 or int64 [2P + 1], the start of each completion, and N: the P chosen ones,
            then the rejected ones in the same order; `layout.label_bounds`. On the CPU, or it is
            copied there, which synchronizes.
        ref_chosen_logps, ref_rejected_logps: [P] summed log-probabilities under the reference model,
            in nats. They receive no gradient.
        objective: the loss and its constants, without aot and aot_unpaired, which compare pairs with
            each other. Default: DPO with beta 0.1.
        weights: [P] factors of the pairs' losses.
        bias, softcap, logit_scale, temperature: as in `linear_logps`.
        outputs: names of the fields of `TokenLogps` to fill.
        memory_budget: maximum number of bytes of a chunk's gradient tiles, or None as said above.

    Returns:
        `LinearPreferenceLoss`.

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
        RuntimeError: in a backward that builds a graph. There is no second derivative.
    """
    check_head(OP, hidden, weight, targets, bias, softcap, logit_scale, temperature, memory_budget)
    references = dict(ref_chosen_logps=ref_chosen_logps, ref_rejected_logps=ref_rejected_logps)
    checks.require_tensors(OP, cu_seqlens=cu_seqlens, **references)
    checks.require_tensors_or_none(OP, weights=weights)
    checks.require_values(OP, cu_seqlens=cu_seqlens)
    require_objective(OP, objective)
    checks.require_floating(OP, **references, weights=weights)
    require_bounds(OP, cu_seqlens, len(targets))
    n_pairs = (len(cu_seqlens) - 1) // 2
    even = len(cu_seqlens) == 2 * n_pairs + 1 and n_pairs > 0
    checks.require(even, OP, "cu_seqlens", "be [2P + 1], P > 0", list(cu_seqlens.shape))
    for name, x in (*references.items(), ("weights", weights)):
        if x is not None:
            checks.require(tuple(x.shape) == (n_pairs,), OP, name, "be [{}]", list(x.shape), n_pairs)
    checks.require_same_device(OP, hidden=hidden, **references, weights=weights)
    separable = not any(loss in SORTED for loss in objective.losses)
    rule = f"have a loss_type without {' and '.join(SORTED)}, which compare pairs with each other"
    checks.require(separable, OP, "objective", rule, objective.loss_type)
    statistics = requested_statistics(OP, outputs)

    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    head = (hidden, weight, bias, targets, softcap, logit_scale, temperature, compute_dtype_of(hidden))
    loss_weights = None if objective.loss_weights is None else [*map(float, objective.loss_weights)]
    constants = (
        *(",".join(objective.losses), loss_weights, float(objective.beta), float(objective.label_smoothing)),
        *(objective.f_divergence_type, float(objective.f_alpha_divergence_coef), float(objective.discopop_tau)),
        float(objective.simpo_gamma),
    )
    chunk_bytes, budget = MEMORY_BUDGET, default_budget(weight)
    if memory_budget is not None:
        chunk_bytes = budget = memory_budget
    pairs = (cu_seqlens, ref_chosen_logps.detach(), ref_rejected_logps.detach(), weights)
    results = _LinearPreferenceLoss.apply(*head, *pairs, *constants, statistics, needs, chunk_bytes, budget)
    tokens = named_results(results[6], results[7:], statistics, targets.shape)
    return LinearPreferenceLoss(PreferenceLoss(*results[:4]), results[4], results[5], tokens)
