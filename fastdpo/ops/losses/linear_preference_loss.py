"""The loss of preference pairs from hidden states and the head's weight, in one visit to each pair.

Dimensions: P pairs, N scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ..devices import accumulation_dtype
from ..head.budget import MEMORY_BUDGET, default_budget
from ..head.formats import TileFormat
from ..head.linear_logps import check_head, compute_dtype_of, linear_logps_bwd, linear_logps_fwd
from ..head.passes import take_kept
from ..head.results import empty_results, named_results, requested_statistics
from ..head.targets import Targets
from ..head.tiles import HeadCall
from .objectives import DPO, SORTED, PreferenceObjective, require_objective
from .preference_loss import PreferenceLoss, loss_dtype, preference_loss
from .results import LinearPreferenceLoss
from .sequence_logps import require_bounds, segment_sums, target_counts

OP = "linear_preference_loss"


class _Pairs(NamedTuple):
    """The pairs of a call, flat, as custom ops take arguments."""

    cu_seqlens: Tensor  # [2P + 1]
    ref_chosen_logps: Tensor  # [P]
    ref_rejected_logps: Tensor  # [P]
    weights: Tensor | None  # [P]
    loss_type: str  # comma-separated
    loss_weights: Sequence[float] | None
    beta: float
    label_smoothing: float
    f_divergence_type: str
    f_alpha_divergence_coef: float
    discopop_tau: float

    @property
    def objective(self) -> PreferenceObjective:
        return PreferenceObjective(self.loss_type.split(","), *self[5:])


@torch.library.custom_op("fastdpo::linear_preference_loss", mutates_args=())
def _fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
    cu_seqlens: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    weights: Tensor | None,
    loss_type: str,
    loss_weights: Sequence[float] | None,
    beta: float,
    label_smoothing: float,
    f_divergence_type: str,
    f_alpha_divergence_coef: float,
    discopop_tau: float,
    statistics: str,
    needs: Sequence[bool],
    chunk_bytes: int,
    memory_budget: int,
) -> list[Tensor]:
    """The loss, and its gradients.

    Returns:
        Gradients of hidden, weight and bias in the dtype of sums, without elements where not
        needed; the fields of `PreferenceLoss`; chosen_logps and rejected_logps; logps and
        statistics of the tokens.
    """
    weight = weight.to(compute_dtype)
    call = HeadCall(hidden, weight, bias, targets, softcap, logit_scale, temperature, compute_dtype)
    pairs = _Pairs(
        cu_seqlens,
        ref_chosen_logps,
        ref_rejected_logps,
        weights,
        loss_type,
        loss_weights,
        beta,
        label_smoothing,
        f_divergence_type,
        f_alpha_divergence_coef,
        discopop_tau,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        return _Visit(call, pairs, statistics, needs, chunk_bytes, memory_budget).results()


@_fwd.register_fake
def _(hidden, weight, bias, targets, softcap, logit_scale, temperature, compute_dtype, *options):
    call = HeadCall(hidden, weight, bias, targets, softcap, logit_scale, temperature, compute_dtype)
    *options, statistics, needs, _, _ = options
    pairs = _Pairs(*options)
    dtype = loss_dtype(hidden, pairs.ref_chosen_logps, pairs.ref_rejected_logps, pairs.weights)
    vectors = [torch.empty_like(pairs.ref_chosen_logps, dtype=dtype) for _ in range(3)]
    sums = [torch.empty_like(x, dtype=accumulation_dtype(hidden.dtype)) for x in vectors[:2]]
    gradients = [torch.empty_like(x) for x in _zero_gradients(call, needs)]
    return [*gradients, vectors[0].new_empty(()), *vectors, *sums, *_empty_tokens(hidden, statistics)]


class _Visit:
    """One call: chunks of pairs, each of which is scored and differentiated before the next one."""

    def __init__(
        self,
        call: HeadCall,
        pairs: _Pairs,
        statistics: str,
        needs: Sequence[bool],
        chunk_bytes: int,
        memory_budget: int,
    ) -> None:
        self.call, self.pairs, self.statistics, self.needs = call, pairs, statistics, needs
        self.format = TileFormat.of(call.weight, call.compute_dtype)
        self.chunk_bytes, self.budget = chunk_bytes, memory_budget
        self.bounds: list[int] = pairs.cu_seqlens.tolist()
        Targets.of(OP, call.targets, len(call.weight))  # names this op where a target is unknown
        self.lengths = target_counts(call.targets, pairs.cu_seqlens.to(call.targets.device)).chunk(2)
        self.gradients = _zero_gradients(call, needs)
        self.tokens = _empty_tokens(call.hidden, statistics)
        # Pairs that are not scored yet have the reference's log-probabilities. No loss of a pair
        # depends on them.
        sums = accumulation_dtype(call.hidden.dtype)
        self.logps = [x.to(sums, copy=True) for x in (pairs.ref_chosen_logps, pairs.ref_rejected_logps)]

    def results(self) -> list[Tensor]:
        for chunk in self._chunks():
            self._visit(chunk)
        return [*self.gradients, *self._loss(self.logps), *self.logps, *self.tokens]

    def _chunks(self) -> Iterator[slice]:
        """Pairs whose gradient tiles fit in `chunk_bytes`, or in one tile. All of them if none are kept."""
        n_pairs = len(self.pairs.ref_chosen_logps)
        row_bytes = self.format.columns * self.format.dtype.itemsize
        capacity = max(self.chunk_bytes // row_bytes, self.format.rows)
        start = size = 0
        for pair in range(n_pairs):
            tokens = sum(self.bounds[i + 1] - self.bounds[i] for i in (pair, n_pairs + pair))
            if self._trains_head and pair > start and size + tokens > capacity:
                yield slice(start, pair)
                start, size = pair, 0
            size += tokens
        yield slice(start, n_pairs)

    @property
    def _trains_head(self) -> bool:
        return any(self.needs[1:])

    def _visit(self, chunk: slice) -> None:
        """Fills the results and gradients of a chunk of pairs."""
        n_pairs = len(self.pairs.ref_chosen_logps)
        rows = [slice(chunk.start + x, chunk.stop + x + 1) for x in (0, n_pairs)]  # their bounds
        spans = [slice(self.bounds[x.start], self.bounds[x.stop - 1]) for x in rows]
        cu_seqlens = [self.pairs.cu_seqlens[x].to(self.call.targets.device) for x in rows]
        call, n = self._call_of(spans), sum(span.stop - span.start for span in spans)
        keep = 0
        if self._trains_head:
            keep = n if n <= self.format.rows else self.format.rows_within(n, self.budget)
        forms_jacobian = self.needs[0] and not self._trains_head
        kept, jacobian, logps, *results = linear_logps_fwd(*call[:8], self.statistics, keep, forms_jacobian)
        sums, tokens = results[:3], (logps, *results[3:])
        for mine, values in zip(self.tokens, tokens, strict=True):
            _scatter(mine, spans, values)
        for mine, span, bounds in zip(self.logps, spans, cu_seqlens, strict=True):
            mine[chunk] = segment_sums(self.tokens[0][span], bounds - bounds[0])
        if not any(self.needs):
            return

        upstream = torch.cat(
            [
                gradient.repeat_interleave(bounds.diff(), output_size=span.stop - span.start)
                for gradient, bounds, span in zip(self._gradients_of_sums(chunk), cu_seqlens, spans, strict=True)
            ]
        )
        grad_hidden, grad_weight, grad_bias = self.gradients
        needs_hidden, needs_weight, needs_bias = self.needs
        main_grad = grad_weight if needs_weight else None
        needs = [needs_hidden, False, needs_bias]
        gradients = linear_logps_bwd(upstream, None, kept, jacobian, sums, needs, main_grad, *call[:8])
        if needs_hidden:
            _scatter(grad_hidden, spans, gradients[0])
        if needs_bias:
            grad_bias += gradients[2]

    def _call_of(self, spans: Sequence[slice]) -> HeadCall:
        """The head on the tokens of some spans. Its inputs are wide, so that their gradients are, which
        are rounded after they have met the upstream gradient.
        """
        hidden, _, bias, targets, *_ = self.call
        wide = accumulation_dtype(self.call.compute_dtype)
        return self.call._replace(
            hidden=torch.cat([hidden[span] for span in spans]).to(wide),
            bias=None if bias is None else bias.to(wide),
            targets=torch.cat([targets[span] for span in spans]),
        )

    def _gradients_of_sums(self, chunk: slice) -> list[Tensor]:
        """Gradients of the loss of all pairs by the chosen and rejected sums of a chunk, [p] each."""
        with _autograd():
            sums = [x.detach().requires_grad_() for x in self.logps]
            losses = self._loss(sums).losses
            gradients = torch.autograd.grad(losses[chunk].sum() / len(losses), sums, materialize_grads=True)
        return [x[chunk] for x in gradients]

    def _loss(self, sums: Sequence[Tensor]) -> PreferenceLoss:
        pairs, (chosen_lengths, rejected_lengths) = self.pairs, self.lengths
        chosen_logps, rejected_logps = sums
        return preference_loss(
            chosen_logps,
            rejected_logps,
            pairs.ref_chosen_logps,
            pairs.ref_rejected_logps,
            pairs.objective,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
            weights=pairs.weights,
        )


def _scatter(out: Tensor, spans: Sequence[slice], values: Tensor) -> None:
    """Writes values to spans of `out`, one after the other."""
    start = 0
    for span in spans:
        size = span.stop - span.start
        out[span] = values[start : start + size]
        start += size


@contextmanager
def _autograd() -> Iterator[None]:
    """Records operations inside of a custom op, below which autograd is excluded from dispatch."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set().add(keys.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


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
        arguments = [None] * (len(ctx.needs_input_grad) - 3)
        if grad_loss is None:
            return None, None, None, *arguments
        gradients = [
            _scaled(x, grad_loss, dtype, is_reused) if needed else None
            for x, dtype, needed in zip(kept, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
        ]
        return *gradients, *arguments


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype, is_reused: bool) -> Tensor:
    """`x * scale`, rounded once to `dtype`. Overwrites x if it has that dtype and its memory `is_reused`."""
    if x.dtype == dtype:
        return x.mul_(scale) if is_reused else x * scale
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype)) if is_reused else (x * scale).to(dtype)


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
    pairs = (len(cu_seqlens) - 1) // 2
    even = len(cu_seqlens) == 2 * pairs + 1 and pairs > 0
    checks.require(even, OP, "cu_seqlens", "be [2P + 1], P > 0", list(cu_seqlens.shape))
    for name, x in (*references.items(), ("weights", weights)):
        if x is not None:
            checks.require(tuple(x.shape) == (pairs,), OP, name, "be [{}]", list(x.shape), pairs)
    checks.require_same_device(OP, hidden=hidden, **references, weights=weights)
    separable = not any(loss in SORTED for loss in objective.losses)
    rule = f"have a loss_type without {' and '.join(SORTED)}, which compare pairs with each other"
    checks.require(separable, OP, "objective", rule, objective.loss_type)
    statistics = requested_statistics(OP, outputs)

    compute_dtype = compute_dtype_of(hidden)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    head = HeadCall(hidden, weight, bias, targets, softcap, logit_scale, temperature, compute_dtype)
    loss_type, loss_weights = ",".join(objective.losses), objective.loss_weights
    constants = _Pairs(
        cu_seqlens,
        ref_chosen_logps.detach(),
        ref_rejected_logps.detach(),
        weights,
        loss_type,
        None if loss_weights is None else [float(x) for x in loss_weights],
        *(float(objective.beta), float(objective.label_smoothing), objective.f_divergence_type),
        *(float(objective.f_alpha_divergence_coef), float(objective.discopop_tau)),
    )
    given = memory_budget is not None
    budgets = (memory_budget, memory_budget) if given else (MEMORY_BUDGET, default_budget(weight))
    results = _LinearPreferenceLoss.apply(*head[:8], *constants, statistics, needs, *budgets)
    tokens = named_results(results[6], results[7:], statistics, targets.shape)
    return LinearPreferenceLoss(PreferenceLoss(*results[:4]), results[4], results[5], tokens)
