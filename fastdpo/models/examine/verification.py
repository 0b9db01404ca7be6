"""Audits a model while it trains: calls 1, 2, 4, 8, ... of each kind are compared with the same calls of the forward
that the model had before, on the batch that is trained on.

Log-probabilities, the statistics that come with them, and at calls 1 and 2 the gradient of a random weighted sum of
log-probabilities, must agree up to rounding. Every loss of a trainer is a function of these log-probabilities, and its
gradient is linear in theirs. Where rounding in one unit does not explain a difference, the bound comes from a second
run of the earlier forward that differs from the first in its rounding only (see `accuracy.run_bound`).

Models are audited that a probe's random rows cannot judge: those with code or hooks of users, those of packages that
are newer than the tested ones, and all with `patch(verify=True)`. An audit leaves no trace: random states, gradients,
counters and what modules keep are as they were. One gradient is held at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ... import packing
from ...accuracy import Difference, layers_of, perturbed, random_rounding, run_difference, training_unit
from ...logs import logger, report, warn
from ...ops import definitions
from ...ops.head.results import TokenLogps
from ...reasons import Reason
from .. import calls
from ..batch import Call
from ..installing import install_head, restore_padded, switch_attention
from ..ranks.sharding import is_sharded, shared_reason
from ..running.pace import training
from ..scoring import prior_output, score
from ..state import FusedForward, RunnableBatch
from . import gradients
from .comparable import without_trace
from .snapshot import restored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WITH_GRADIENTS = 2
"""The calls up to which gradients are compared as well, if they are among those that are audited."""

_LABELS = {"mean_logits": "mean logits", "log_sum_sq_probs": "sums of squares"}


class VerificationError(RuntimeError):
    """With `patch(verify=True)`: a fused call of a model, or the first loss of a trainer, differs from the stock one
    by more than rounding explains. If it is the first call, no weight has been changed.

    Attributes:
        differences: in words.
    """

    def __init__(self, message: str, differences: str = ""):
        super().__init__(message)
        self.differences = differences


Outcome = tuple[dict[str, Tensor], dict[str, Tensor]]
"""What one side computes, by names: values [N] or hidden states [N, D] of scored tokens, and everything else."""

Results = tuple[TokenLogps, dict[str, Tensor]]
"""What one side returns: results of shape [R, W], zero where nothing is scored, and other results to be compared."""


def audit(model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch | None, given: Call) -> Reason | None:
    """Compares a call that is about to run with the same call of the prior forward, if that is due.

    Returns why all calls go to the prior forward from now on. Ranks that run the model together, one of which may leave
    its batch to the prior forward, audit the same calls, without gradients, and get the same result.

    Raises:
        VerificationError: they differ, and `verify` was asked for.
    """
    options, kind, is_shared = fused.options, fused.kind_of_call(model), is_sharded(model)
    if (batch is None and not is_shared) or options.sequence_group is not None:
        return None
    call = calls.due(fused.audited, (kind, torch.is_grad_enabled()))
    if not call:
        return None
    obstacle, differences = None, []
    with_gradients = torch.is_grad_enabled() and call <= WITH_GRADIENTS and not is_shared
    for gradients_too in (True, False) if with_gradients else (False,):
        try:
            with restored(model), torch.set_grad_enabled(gradients_too):
                differences = _compare(model, fused, batch, given)
            if differences is not None:
                break
            obstacle = obstacle or Reason("verified-checkpoints")
        except torch.OutOfMemoryError:
            if is_shared:  # other ranks go on
                raise
            obstacle = obstacle or Reason("audit-memory")
    if batch is not None and batch.is_run:
        fused.runner.interrupt()
    name, differences = f"{options.integration} ({options.role})", differences or []
    wrong = ", ".join(str(x) for x in differences if not x.is_explained)
    if differences and not wrong:
        level, how = logging.INFO if call == 1 else logging.DEBUG, _how(fused, batch)
        logger.log(level, "fastdpo: %s: verified%s; differs in %s", name, how, ", ".join(map(str, differences)))
    reason = None
    if not wrong and obstacle is None:
        calls.outcomes[options.integration, "verified"] += 1
    elif options.newer and call == 1:
        cannot = f"its calls cannot be compared with stock ones: {obstacle}"
        finding = f"its first call differs from stock in {wrong}" if wrong else cannot
        reason = Reason("changed-calls", package=options.newer, finding=finding)
    elif wrong:
        step, model_name = training().done + 1, type(model).__name__
        reason = Reason("different-calls", call=call, kind=kind, step=step, model=model_name, finding=wrong)
    elif call == 1:
        (report if options.verify else warn)(f"{name}: not verified, {cast(Reason, obstacle).named}")
    reason = shared_reason(model, reason)
    if reason is None or not options.verify:
        return reason
    if not wrong:
        raise VerificationError(f"fastdpo: {reason}", str(reason))
    since = "No weight has been changed" if call == 1 else f"This is call {call}; call {call // 2} agreed"
    raise VerificationError(
        f"fastdpo: {name}: the fused path differs from the stock path by more than rounding explains, in {wrong}. "
        f"{since}. Train without fastdpo, and report this",
        wrong,
    )


def _compare(
    model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch | None, given: Call
) -> list[Difference] | None:
    """Compares one call, with gradients if they are enabled. None if checkpointing differentiates inside of the
    backward pass. A model with dropout is compared without. Parameters have no gradients meanwhile. Without a batch,
    the prior forward runs as often.
    """
    is_random = fused.is_random(model)
    if batch is None:
        with without_trace(model, leaves_out_dropout=is_random):
            for _ in range(3):
                prior_output(fused, given)
        return []
    label_mask, scores = given.batch.targets != packing.IGNORE_INDEX, "log-probabilities"
    if fused.options.rewards:
        label_mask, scores = label_mask.any(1, keepdim=True), fused.options.rewards.scored

    def outcome(score: Callable[..., Results], *fused_only: Any) -> Outcome:
        torch.manual_seed(0)
        return _outcome(model, label_mask, scores, *score(fused, given, *fused_only))

    unit = training_unit(model)
    with without_trace(model, leaves_out_dropout=is_random):
        with _as_before(model, fused):
            expected = outcome(_prior_results)
        # A recording needs two batches, and is compared with the layers when it is made.
        found = outcome(_fused_results, model, batch._replace(is_run=False))
        differences = _differences(label_mask, found, expected, expected, unit)
        is_shared = is_sharded(model)  # ranks run a model together equally often
        if is_shared or not all(x.is_explained for x in differences):
            with _as_before(model, fused), perturbed(layers_of(model), random_rounding, unit):
                rounded = outcome(_prior_results)
            differences = _differences(label_mask, found, expected, rounded, unit)
        # A gradient is that of a `backward` inside of the backward pass.
        return differences if all(x.grad is None for x in model.parameters()) else None


def _how(fused: FusedForward, batch: RunnableBatch | None) -> str:
    """What ran the layers of a call that was compared, in words, if it was not the model alone."""
    compiled = fused.runner.compiled
    layers = "compiled layers" if compiled is not None and compiled.layers else "layers"
    if batch is not None and batch.is_run and fused.runner.may_replay:
        return f" with its {layers}, which CUDA graphs are compared with"
    return f" with its {layers}" if layers != "layers" else ""


def _fused_results(fused: FusedForward, given: Call, model: PreTrainedModel, batch: RunnableBatch) -> Results:
    scored = score(model, fused, batch, given)
    return scored.logps, _other_results(fused, fused.make_output(scored, given.kwargs)) if fused.prior_scores else {}


def _prior_results(fused: FusedForward, given: Call) -> Results:
    """What the prior forward computes of a batch, [R, W]."""
    options = fused.options
    if fused.prior_scores:
        output = prior_output(fused, given)
        logps = TokenLogps(output.log_probs, **{name: getattr(output, name) for name in options.outputs})
        return logps, _other_results(fused, output)
    given = given._replace(kwargs={name: x for name, x in given.kwargs.items() if name != "logits_to_keep"})
    output, targets = prior_output(fused, given), given.batch.targets
    if options.rewards:
        return TokenLogps(options.rewards.returned(output, targets != packing.IGNORE_INDEX)), {}
    logits = output.logits[:, : targets.shape[1]]
    outputs = ("logps", *options.outputs)
    return definitions.token_logps(
        logits, targets.to(logits.device), temperature=options.temperature, outputs=outputs
    ), {}


def _other_results(fused: FusedForward, output: Any) -> dict[str, Tensor]:
    """What a model that scores returns next to the results of tokens, such as its loss, if its package is newer.

    A result that is new is among them.
    """
    own = ("log_probs", *fused.options.outputs)
    return {name: x for name, x in output.items() if name not in own} if fused.options.newer else {}


@contextmanager
def _as_before(model: PreTrainedModel, fused: FusedForward) -> Iterator[None]:
    """In the block, the attention and the head of the model are its own."""
    restore_padded(model, fused)
    try:
        yield
    finally:
        switch_attention(model, fused)
        install_head(model, fused)


def _outcome(
    model: PreTrainedModel, label_mask: Tensor, scores: str, scored: TokenLogps, others: dict[str, Tensor]
) -> Outcome:
    others = {name: x.detach().double().cpu().flatten() for name, x in others.items()}
    values = {name: x for name, x in scored._asdict().items() if x is not None and x.is_floating_point()}
    labels = {"logps": scores, **_LABELS}
    values = {labels.get(name, name): x.detach()[label_mask].double().cpu() for name, x in values.items()}
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    if torch.is_grad_enabled() and scored.logps.requires_grad and trained:
        logps = scored.logps[label_mask]
        weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1), device="cpu")
        sketched, _ = gradients.sketches(logps, weights.to(logps), trained)
        others |= {f"gradient of {group}": x for group, x in gradients.by_group(sketched, model).items()}
    return values, others


def _differences(
    label_mask: Tensor, found: Outcome, expected: Outcome, rounded: Outcome, unit: float
) -> list[Difference]:
    differences = []
    for ours, stock, other in zip(found, expected, rounded, strict=True):
        for name in dict.fromkeys((*stock, *ours)):
            x = run_difference(name, ours.get(name), stock.get(name), other.get(name), unit)
            if stock is expected[0] and x.size is not None and not x.is_explained:
                x = x._replace(detail=_place(label_mask, ours[name], stock[name]))
            differences.append(x)
    return differences


def _place(label_mask: Tensor, found: Tensor, expected: Tensor) -> str:
    worst = int((found - expected).abs().nan_to_num(torch.inf).reshape(len(found), -1).amax(1).argmax())
    row, position = label_mask.nonzero()[worst].tolist()
    token = f", token {position + 1}" if label_mask.shape[1] > 1 else ""
    values = f": {float(found[worst]):.6g}, stock {float(expected[worst]):.6g}" if found.dim() == 1 else ""
    return f"; row {row}{token}{values}"
