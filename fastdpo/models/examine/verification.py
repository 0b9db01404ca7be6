"""Compares the first fused call of a model with the same call of the forward that it had before.

Log-probabilities, the statistics that come with them, and the gradient of a random weighted sum of
log-probabilities must agree up to rounding. Every loss of a trainer is a function of these
log-probabilities, and its gradient is linear in theirs. The bound comes from a second run of the
earlier forward that differs from the first in its rounding only (see `accuracy.run_bound`).

Neither random states nor gradients nor counters are changed. Up to one gradient is held at a time,
as in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import packing
from ...accuracy import error, layers_of, perturbed, random_rounding, run_bound, training_unit
from ...logs import logger, report
from ...ops import definitions
from ...ops.head.results import TokenLogps
from ...reasons import Reason
from .. import calls, gradients
from ..scoring import prior_logits, score, targets_of_call
from ..sharding import is_sharded
from ..state import FusedForward, RunnableBatch, install_head, restore_padded, switch_attention
from .comparable import NOT_REENTRANT, forked_random_state, unwatched, with_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LABELS = {"mean_logits": "mean logits", "log_sum_sq_probs": "sums of squares"}


class VerificationError(RuntimeError):
    """With `patch(verify=True)`: the first fused call of a model, or the first loss of a trainer,
    differs from the stock one by more than rounding explains. No weight has been changed.

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


def verify(
    model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, args: tuple, kwargs: dict
) -> Reason | None:
    """Compares a call that is about to run with the same call of the prior forward.

    Returns why all calls go to the prior forward from now on. Only a trial has such a reason.

    Raises:
        VerificationError: they differ, and this is no trial.
    """
    options = fused.options
    name, finding, obstacle = f"{options.integration} ({options.role})", None, None
    fused.verified.add(torch.is_grad_enabled())
    if is_sharded(model):
        fused.verified.update((True, False))
        obstacle = Reason("verified-ranks")
    else:
        try:
            obstacle = _compare(name, model, fused, batch, args, kwargs)
            calls.outcomes[options.integration, "verified"] += obstacle is None
        except VerificationError as error:
            if options.verify:
                raise
            finding = f"its first call differs from stock in {error.differences}"
    if obstacle is not None and options.newer:
        finding = f"its calls cannot be compared with stock ones: {obstacle}"
    elif obstacle is not None:
        report(f"{name}: not verified, {obstacle.named}")
    return None if finding is None else Reason("changed-calls", package=options.newer, finding=finding)


def _compare(
    name: str, model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, args: tuple, kwargs: dict
) -> Reason | None:
    """Compares one call, with gradients if they are enabled, or returns why it cannot be compared. A model with dropout
    is compared in evaluation mode. Parameters have no gradients meanwhile.

    Raises:
        VerificationError: the two sides differ.
    """
    is_random = fused.probe_result is not None and fused.probe_result.is_random
    label_mask, scores = targets_of_call(kwargs) != packing.IGNORE_INDEX, "log-probabilities"
    if fused.options.rewards:
        label_mask, scores = label_mask.any(1, keepdim=True), fused.options.rewards.scored

    def outcome(score: Callable[..., Results], *call: Any) -> _Outcome:
        torch.manual_seed(0)
        return _outcome(model, label_mask, scores, *score(fused, *call))

    unit = training_unit(model)
    values: list[tuple[Any, str, Any]] = []
    values += [(x, "p", 0.0) for x in model.modules() if isinstance(x, nn.modules.dropout._DropoutNd)]
    values += [(x, "training", False) for x in model.modules() if is_random]
    with forked_random_state(), with_values([NOT_REENTRANT, *values]), unwatched(model.parameters()):
        with _as_before(model, fused):
            expected = outcome(_prior_results, args, kwargs)
            with perturbed(layers_of(model), random_rounding, unit):
                rounded = outcome(_prior_results, args, kwargs)
        # A recording needs two batches, and is compared with the layers when it is made.
        found = outcome(_fused_results, model, batch._replace(is_run=False), kwargs)
        if any(x.grad is not None for x in model.parameters()):  # by a `backward` inside of the backward pass
            return Reason("verified-checkpoints")
    differences = [*_differences(label_mask, found, expected, rounded, unit)]
    wrong = ", ".join(str(x) for x in differences if not x.explained)
    if wrong:
        raise VerificationError(
            f"fastdpo: {name}: the fused path differs from the stock path by more than rounding explains, in "
            f"{wrong}. No weight has been changed. Train without fastdpo, and report this",
            wrong,
        )
    how = _how(fused, batch)
    logger.info("fastdpo: %s: verified%s; differs in %s", name, how, ", ".join(map(str, differences)))
    return None


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
        output = fused.prior_forward(*args, fused_lm_head=True, **kwargs)
        logps = TokenLogps(output.log_probs, **{name: getattr(output, name) for name in options.outputs})
        return logps, _other_results(fused, output)
    kwargs = {name: x for name, x in kwargs.items() if name != "logits_to_keep"}
    output, targets = prior_logits(fused, args, kwargs), targets_of_call(kwargs)
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
