"""Audits a model while it trains: calls 1, 2, 4, 8, ... of each kind are compared with the same calls of the forward
that the model had before, on the batch that is trained on.

Log-probabilities, the statistics that come with them, and at calls 1 and 2 the gradient of a random weighted sum of
log-probabilities, must agree up to rounding. Every loss of a trainer is a function of these log-probabilities, and its
gradient is linear in theirs. Where rounding in one unit does not explain a difference, the bound comes from a second
run of the earlier forward that differs from the first in its rounding only (see `accuracy.run_bound`).

Models are audited that a probe's random rows cannot judge: those with code or hooks of users, those of packages that
are newer than the tested ones, and all with `patch(verify=True)`. An audit leaves no trace: random states, gradients,
counters and what modules keep are as they were. Up to one gradient is held at a time, as in a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ... import packing
from ...accuracy import error, layers_of, perturbed, random_rounding, run_bound, training_unit
from ...logs import logger, report, warn
from ...ops import definitions
from ...ops.head.results import TokenLogps
from ...reasons import Reason
from .. import calls
from ..ranks.sharding import is_sharded, shared_reason
from ..running.pace import training
from ..scoring import prior_output, score, targets_of_call
from ..state import FusedForward, RunnableBatch, install_head, restore_padded, switch_attention
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


class Difference(NamedTuple):
    """A quantity of the fused and the stock side.

    Attributes:
        name: of the quantity.
        size: the relative difference of the two sides, `||fused - stock|| / ||stock||`.
        allowed: the largest difference that rounding explains.
        detail: where it is largest, or "".
    """

    name: str
    size: float
    allowed: float
    detail: str = ""

    @property
    def explained(self) -> bool:
        return self.size <= self.allowed  # not for NaN

    def __str__(self) -> str:
        return f"{self.name} by {self.size:.1e} (at most {self.allowed:.1e}{self.detail})"


class _Outcome(NamedTuple):
    """What one side computes: values [N] or hidden states [N, D] of scored tokens, sketches of gradients, and other
    results.
    """

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    others: dict[str, Tensor]


Results = tuple[TokenLogps, dict[str, Tensor]]
"""What one side returns: results of shape [R, W], zero where nothing is scored, and other results to be compared."""


def audit(
    model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch | None, args: tuple, kwargs: dict
) -> Reason | None:
    """Compares a call that is about to run with the same call of the prior forward, if that is due.

    Returns why all calls go to the prior forward from now on. Ranks that run the model together, one of which may leave
    its batch to the prior forward, audit the same calls, without gradients, and get the same result.

    Raises:
        VerificationError: they differ, and `verify` was asked for.
    """
    options, kind, verdict = fused.options, fused.kind_of_call(model), fused.verdict
    if verdict is None or not (options.verify or options.newer or verdict.is_audited):
        return None
    is_shared = verdict.key.is_sharded
    if (batch is None and not is_shared) or options.sequence_group is not None:
        return None
    fused.audited[kind, torch.is_grad_enabled()] += 1
    call = fused.audited[kind, torch.is_grad_enabled()]
    if call & (call - 1):
        return None
    difference = obstacle = None
    with_gradients = torch.is_grad_enabled() and call <= WITH_GRADIENTS and not is_shared
    for gradients_too in (True, False) if with_gradients else (False,):
        failed = None
        try:
            with restored(model), torch.set_grad_enabled(gradients_too):
                failed = _compare(model, fused, batch, args, kwargs, call)
        except torch.OutOfMemoryError:
            if is_shared:  # other ranks go on
                raise
            failed = Reason("audit-memory")
        except VerificationError as error:
            difference = error
        obstacle = obstacle or failed
        if failed is None:
            break
    if batch is not None and batch.is_run:
        fused.runner.interrupt()
    reason = shared_reason(model, _reason(model, fused, kind, call, difference, obstacle))
    if reason is not None and options.verify:
        raise difference or VerificationError(f"fastdpo: {reason}", str(reason))
    return reason


def _reason(
    model: PreTrainedModel,
    fused: FusedForward,
    kind: str,
    call: int,
    difference: VerificationError | None,
    obstacle: Reason | None,
) -> Reason | None:
    """Why calls go to the prior forward from now on, given how one differs, or why it could not be compared."""
    options, is_first_of_newer = fused.options, bool(fused.options.newer) and call == 1
    if difference is None and obstacle is None:
        calls.outcomes[options.integration, "verified"] += 1
    elif is_first_of_newer and difference is not None:
        finding = f"its first call differs from stock in {difference.differences}"
        return Reason("changed-calls", package=options.newer, finding=finding)
    elif is_first_of_newer:
        finding = f"its calls cannot be compared with stock ones: {obstacle}"
        return Reason("changed-calls", package=options.newer, finding=finding)
    elif difference is not None:
        step, name, finding = training().done + 1, type(model).__name__, difference.differences
        return Reason("different-calls", call=call, kind=kind, step=step, model=name, finding=finding)
    elif call == 1:
        message = f"{options.integration} ({options.role}): not verified, {cast(Reason, obstacle).named}"
        (report if options.verify else warn)(message)
    return None


def _compare(
    model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch | None, args: tuple, kwargs: dict, call: int
) -> Reason | None:
    """Compares one call, with gradients if they are enabled, or returns why it cannot be compared. A model with dropout
    is compared without. Parameters have no gradients meanwhile. Without a batch, the prior forward runs as often.

    Raises:
        VerificationError: the two sides differ.
    """
    is_random = fused.is_random(model)
    if batch is None:
        with without_trace(model, leaves_out_dropout=is_random):
            for _ in range(3):
                prior_output(fused, args, kwargs)
        return None
    label_mask, scores = targets_of_call(kwargs) != packing.IGNORE_INDEX, "log-probabilities"
    if fused.options.rewards:
        label_mask, scores = label_mask.any(1, keepdim=True), fused.options.rewards.scored

    def outcome(score: Callable[..., Results], *call: Any) -> _Outcome:
        torch.manual_seed(0)
        return _outcome(model, label_mask, scores, *score(fused, *call))

    unit, rounded = training_unit(model), None
    with without_trace(model, leaves_out_dropout=is_random):
        with _as_before(model, fused):
            expected = outcome(_prior_results, args, kwargs)
        # A recording needs two batches, and is compared with the layers when it is made.
        found = outcome(_fused_results, model, batch._replace(is_run=False), kwargs)
        differences = [*_differences(label_mask, found, expected, expected, unit)]
        if not all(x.explained for x in differences) or is_sharded(model):  # ranks run a model together equally often
            with _as_before(model, fused), perturbed(layers_of(model), random_rounding, unit):
                rounded = outcome(_prior_results, args, kwargs)
            differences = [*_differences(label_mask, found, expected, rounded, unit)]
        if any(x.grad is not None for x in model.parameters()):  # by a `backward` inside of the backward pass
            return Reason("verified-checkpoints")
    wrong = ", ".join(str(x) for x in differences if not x.explained)
    name = f"{fused.options.integration} ({fused.options.role})"
    if wrong:
        raise VerificationError(
            f"fastdpo: {name}: the fused path differs from the stock path by more than rounding explains, in "
            f"{wrong}. {_since(call)}. Train without fastdpo, and report this",
            wrong,
        )
    level, how = logging.INFO if call == 1 else logging.DEBUG, _how(fused, batch)
    logger.log(level, "fastdpo: %s: verified%s; differs in %s", name, how, ", ".join(map(str, differences)))
    return None


def _since(call: int) -> str:
    """What a difference in a call says of the weights."""
    if call == 1:
        return "No weight has been changed"
    return f"This is call {call}; call {call // 2} agreed"


def _how(fused: FusedForward, batch: RunnableBatch) -> str:
    """What ran the layers of a call that was compared, in words, if it was not the model alone."""
    compiled = fused.runner.compiled
    layers = "compiled layers" if compiled is not None and compiled.layers else "layers"
    if batch.is_run and fused.runner.may_replay:
        return f" with its {layers}, which CUDA graphs are compared with"
    return f" with its {layers}" if layers != "layers" else ""


def _fused_results(fused: FusedForward, model: PreTrainedModel, batch: RunnableBatch, kwargs: dict) -> Results:
    scored = score(model, fused, batch, kwargs)
    return scored.logps, _other_results(fused, fused.make_output(scored, kwargs)) if fused.prior_scores else {}


def _prior_results(fused: FusedForward, args: tuple, kwargs: dict) -> Results:
    """What the prior forward computes of a batch, [R, W]."""
    options = fused.options
    if fused.prior_scores:
        output = prior_output(fused, args, kwargs)
        logps = TokenLogps(output.log_probs, **{name: getattr(output, name) for name in options.outputs})
        return logps, _other_results(fused, output)
    kwargs = {name: x for name, x in kwargs.items() if name != "logits_to_keep"}
    output, targets = prior_output(fused, args, kwargs), targets_of_call(kwargs)
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
) -> _Outcome:
    others = {name: x.detach().double().cpu().flatten() for name, x in others.items()}
    values = {name: x for name, x in scored._asdict().items() if x is not None and x.is_floating_point()}
    labels = {"logps": scores, **_LABELS}
    values = {labels.get(name, name): x.detach()[label_mask].double().cpu() for name, x in values.items()}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not scored.logps.requires_grad or not trained:
        return _Outcome(values, {}, others)
    logps = scored.logps[label_mask]
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1), device="cpu")
    total = (logps * weights.to(logps)).sum()
    names, parameters = zip(*trained, strict=True)
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    named = ((name, x) for name, x in zip(names, found, strict=True) if x is not None)
    return _Outcome(values, gradients.sketches(named, gradients.groups_of(model)), others)


def _differences(
    label_mask: Tensor, found: _Outcome, expected: _Outcome, rounded: _Outcome, unit: float
) -> Iterator[Difference]:
    for name, x in expected.values.items():
        size = error(found.values[name], x)
        bound = run_bound(error(rounded.values[name], x), unit)
        yield Difference(name, size, bound, "" if size <= bound else _place(label_mask, found.values[name], x))
    for name, x in expected.others.items():
        if name not in found.others or found.others[name].shape != x.shape:
            yield Difference(name, math.inf, 0.0)
        else:
            yield Difference(name, error(found.others[name], x), run_bound(error(rounded.others[name], x), unit))
    for group in (x for x in gradients.GROUPS if x in expected.gradients or x in found.gradients):
        zeros = torch.zeros(gradients.SIZE, device="cpu")
        sides = (side.gradients.get(group, zeros) for side in (found, expected, rounded))
        fused, stock, other = sides
        yield Difference(f"gradient of {group}", error(fused, stock), run_bound(error(other, stock), unit))


def _place(label_mask: Tensor, found: Tensor, expected: Tensor) -> str:
    worst = int((found - expected).abs().nan_to_num(torch.inf).reshape(len(found), -1).amax(1).argmax())
    row, position = label_mask.nonzero()[worst].tolist()
    token = f", token {position + 1}" if label_mask.shape[1] > 1 else ""
    values = f": {float(found[worst]):.6g}, stock {float(expected[worst]):.6g}" if found.dim() == 1 else ""
    return f"; row {row}{token}{values}"
