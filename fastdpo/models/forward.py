"""The fused forward of a causal LM, through which all integrations score their batches.

`model(input_ids=..., attention_mask=..., labels=..., fused_lm_head=True)` packs the padded batch,
runs the model's own backbone on the packed tokens, scores the labelled positions with the fused
head, and returns per-token results in the padded shape. All other calls, and batches that are not
supported, go to the forward that the model had before.

All of this happens inside `model(...)`, so that the hooks of DDP, FSDP2, ZeRO-3, PEFT and autocast
see an ordinary call.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .. import packing
from ..logs import logger
from ..ops import definitions
from ..ops.head.results import TokenLogps
from ..packing import Layout, NotPackable
from ..reasons import Reason
from . import attention, fallback, head, images, output_dtypes, probe, support, towers, verification
from .fallback import calls
from .language_model import backbone, text_config
from .layouts import Groups, SharePrompts, layout_of, padded_batch
from .probe import ProbeResult
from .router import returns_router_logits
from .structure import Structure

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTRIBUTE = "_fastdpo_forward"
"""The attribute of a model that holds its `_FusedForward`."""

SCORING_ARGUMENTS = {"labels", "shift_labels", "num_items_in_batch"}
"""Arguments that a model's own forward does not receive when only its logits are needed."""

MAX_PROBE_RESULTS = 16
"""Number of structures of a model whose probe results are kept, for
models that are switched back and forth.
"""


class Request(NamedTuple):
    """The options of a model's fused forward.

    Attributes:
        integration: name under which calls are counted and logged, such as "trl.DPOTrainer".
        role: "policy" or "reference".
        kind_without_gradient: the kind that calls of a policy in training mode without gradients are
            counted as (see `fallback.calls`).
        outputs: statistics to return next to log-probabilities (see `ops.linear_logps`).
        temperature: divides the logits.
        float32_head: whether the head computes in float32.
        share_prompts: whether tokens that rows of the same group begin with are computed once;
            "deterministic": unless dropout or other noise is active.
        groups: which rows of a batch are a group. In batches with images, pairs are.
        images: whether batches may hold images, those of the first rows of all pairs first.
        memory_budget: bytes of the head's gradient tiles to keep from forward to backward, or None
            for the default of `ops.linear_logps`.
        verify: whether the first fused call with gradients and the first one without are compared
            with the prior forward.
        changed: functions of the prior forward's package that have changed since it was tested. Calls are
            then compared, too, and go there from then on if they differ.
    """

    integration: str
    role: str
    kind_without_gradient: str = "reference"
    outputs: tuple[str, ...] = ()
    temperature: float = 1.0
    float32_head: bool = False
    share_prompts: SharePrompts = True
    groups: Groups = "content"
    images: bool = False
    memory_budget: int | None = None
    verify: bool = False
    changed: tuple[str, ...] = ()

    @property
    def is_compared(self) -> bool:
        return self.verify or bool(self.changed)


class ScoredBatch(NamedTuple):
    """Result of one fused call.

    Attributes:
        logps: per-token results, [R, W] each, zero where nothing is scored.
        label_mask: bool [R, W], where a token is scored.
        router_logits: of each layer, [T, experts] for T packed tokens; None if they were not
            requested.
        multiplicity: [1, T], how often each packed token occurs in the batch.
    """

    logps: TokenLogps
    label_mask: Tensor
    router_logits: tuple[Tensor, ...] | None
    multiplicity: Tensor


MakeOutput = Callable[[ScoredBatch, dict], object]
"""Makes a model's output from a scored batch and the keyword arguments of the call."""


class _RunnableBatch(NamedTuple):
    """How a call runs: packed by its layout, or padded as it came, with
    a layout that says what is scored.

    Attributes:
        layout: of the batch.
        inputs: arguments of the backbone.
        images: the image tensors of a packed batch.
        args: positional arguments of the backbone.
        bare_head: whether hooks and a forward that other code has given the head are left out.
    """

    layout: Layout
    inputs: dict[str, Any]
    images: dict[str, Tensor]
    args: tuple = ()
    bare_head: bool = False


@dataclass
class _FusedForward:
    """The state of a model's fused forward.

    Attributes:
        prior_forward: the forward before ours.
        prior_scores: whether the prior forward takes `fused_lm_head` and labels.
        logit_transform: (softcap, logit_scale) of the model.
        disabled_reason: why all calls go to the prior forward, whatever becomes of the model.
        choose: `_choose`, excluded from compilation.
        examine: `_model_reason`, excluded from compilation.
        inner: an earlier fused forward, if other code has wrapped it since.
        prior_attention: the attention implementation to restore; None if the model is not switched.
        forward: the function that is the model's forward now.
        probe_results: by the hash of the structure that the model had when it was probed.
        probe_result: of the model as it is; None before its first call.
        examined: the hash of the structure that the model has.
        image_batches: packs batches with images.
        logged: reasons that have been logged, for which calls have fallen back.
        was_called: whether an integration has called the model, or has left a call to its trainer.
        is_awaited: whether other ranks may examine the model in a call that this rank has left to its
            trainer.
        verified: the kinds of calls, with gradients (True) and without (False), that are not to be
            verified any more.
        has_logged_dropout: whether it was logged that prompts are not shared.
    """

    request: Request
    make_output: MakeOutput
    prior_forward: Callable
    prior_scores: bool
    logit_transform: tuple[float | None, float]
    disabled_reason: Reason | None
    choose: Callable[..., _RunnableBatch | None]
    examine: Callable[..., Reason | None]
    inner: _FusedForward | None
    prior_attention: str | None = None
    forward: Callable | None = None
    structure: Structure = field(default_factory=Structure)
    probe_results: dict[int, ProbeResult] = field(default_factory=dict)
    probe_result: ProbeResult | None = None
    examined: int = 0
    image_batches: images.ImageBatches = field(default_factory=images.ImageBatches)
    logged: set[Reason] = field(default_factory=set)
    was_called: bool = False
    is_awaited: bool = False
    verified: set[bool] = field(default_factory=set)
    has_logged_dropout: bool = False

    def unsupported_reason(self) -> Reason | None:
        """Why all calls fall back, as far as is known."""
        if self.disabled_reason is not None or self.probe_result is None:
            return self.disabled_reason
        return self.probe_result.unsupported_reason


_models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def install(model: PreTrainedModel, request: Request, make_output: MakeOutput, *, prior_scores: bool = True) -> None:
    """Replaces the forward of a model. If the model is not supported, logs why, and only counts its
    calls.

    Args:
        model: the causal LM itself, without wrappers of PEFT or engines.
        request: what the fused forward computes.
        make_output: makes the output of fused calls.
        prior_scores: whether the model's present forward takes `fused_lm_head` and labels. If not,
            it is the model's own: calls that are not fused return its logits, and the fused head is
            compared with them first.
    """
    uninstall(model)
    # Packing works on the host, so a compiled model packs outside of its graphs. Decorating here
    # rather than at import keeps Triton, which Dynamo imports, out of `import fastdpo`.
    choose = torch.compiler.disable(_choose, reason="packing works on the host")
    choose = cast(Callable[..., "_RunnableBatch | None"], choose)
    examine = cast(Callable[..., "Reason | None"], torch.compiler.disable(_model_reason, reason="it runs once"))
    reason = support.unsupported_reason(model)
    if reason is None and not prior_scores:
        reason = support.forward_unsupported_reason(model)
    transform = support.logit_transform(text_config(model))
    inner = _state_of(model)
    fused = _FusedForward(request, make_output, model.forward, prior_scores, transform, reason, choose, examine, inner)
    if reason is not None:
        _log_once(fused, reason)

    def forward(self, *args, fused_lm_head=False, **kwargs):
        fused = cast(_FusedForward, _state_of(self))  # not from the closure: a deep copy of the model has its own
        while fused.forward is not forward:
            fused = cast(_FusedForward, fused.inner)
        if fused_lm_head:
            return _call(self, fused, args, kwargs)
        if fused.is_awaited:
            fused.is_awaited = False
            fused.examine(self, fused, _device_of(self, args, kwargs))
        return fused.prior_forward(*args, **kwargs)

    # `generate` and Trainer read the signature. functools.wraps would set `__wrapped__`, which
    # accelerate follows.
    forward.__signature__ = inspect.signature(type(model).forward)
    fused.forward = forward
    model.forward = MethodType(forward, model)
    vars(model)[ATTRIBUTE] = fused
    _models.add(model)


def uninstall(model: PreTrainedModel) -> None:
    """Restores a model's forward, attention and head. Works for copies of a model, too."""
    fused = _state_of(model)
    if fused is None:
        return
    _models.discard(model)
    if getattr(model.forward, "__func__", None) is fused.forward:
        del model.forward, vars(model)[ATTRIBUTE]
        if fused.prior_forward != model.forward:  # not that of the class
            model.forward = fused.prior_forward
        if fused.inner is not None:
            vars(model)[ATTRIBUTE] = fused.inner
    else:  # other code has wrapped our forward: stay in its chain, and pass calls on
        fused.disabled_reason = Reason("unpatched")
    _restore(model, fused)


def uninstall_all(integration: str) -> None:
    """Uninstalls the fused forward of every model that an integration has installed it on."""
    for model in list(_models):
        if vars(model)[ATTRIBUTE].request.integration == integration:
            uninstall(model)


def is_installed(model: nn.Module, integration: str) -> bool:
    """Whether a model, or one inside of it, has the fused forward of an integration."""
    return _model_of(model, integration) is not None


def was_called(model: nn.Module, integration: str) -> bool:
    """Whether a model's fused forward of an integration has been called, or passed over with a reason."""
    base = _model_of(model, integration)
    return base is not None and vars(base)[ATTRIBUTE].was_called


def is_fused(model: nn.Module) -> bool:
    """Whether calls of a model, or of one inside of it, may take the fused path."""
    states = map(_state_of, model.modules())
    return any(fused is not None and fused.unsupported_reason() is None for fused in states)


def disabled_reason(model: nn.Module, integration: str) -> Reason | None:
    """Why all calls of a model fall back. None if they do not, or if that is not known yet."""
    base = _model_of(model, integration)
    return None if base is None else vars(base)[ATTRIBUTE].unsupported_reason()


def is_random(model: nn.Module, integration: str) -> bool:
    """Whether a model draws random numbers in training mode, as far as is known before its first call."""
    base = _model_of(model, integration)
    return base is not None and _is_random(base, vars(base)[ATTRIBUTE])


def logged_reasons(model: nn.Module, integration: str) -> frozenset[Reason]:
    """The reasons for which calls of a model have fallen back so far."""
    base = _model_of(model, integration)
    return frozenset() if base is None else frozenset(vars(base)[ATTRIBUTE].logged)


def examine_again(model: nn.Module, integration: str) -> None:
    """Forgets how a model was found in its calls so far, so that its next call probes it.

    Every rank of those that run the model together must call this.
    """
    base = _model_of(model, integration)
    if base is not None:
        vars(base)[ATTRIBUTE].probe_results.clear()


def record_fallback(model: nn.Module, integration: str, reason: Reason) -> None:
    """Counts and logs a call that an integration leaves to its trainer before the model sees it.

    The trainer must run the same modules in that call as a fused one does, which the model's own forward
    does: ranks that run the model together may not all leave it.
    """
    base = cast("PreTrainedModel", _model_of(model, integration))
    fused = vars(base)[ATTRIBUTE]
    fused.was_called = True
    fused.is_awaited = not fused.probe_results and support.is_sharded(base)
    calls[integration, _kind_of_call(base, fused), "stock"] += 1
    _log_once(fused, fused.unsupported_reason() or reason)


def fix_batch(model: PreTrainedModel, kwargs: dict, convert: Callable[[Tensor], Tensor]) -> None:
    """Makes every call of a model run one batch packed, without a look at the model.

    For a model of fake tensors, which cannot be examined.

    Args:
        model: a model with a fused forward, in the mode in which it will be called.
        kwargs: the arguments of a call with the batch, whose tensors have values.
        convert: makes the tensors that the calls use. What attention reads on the host stays as it is.

    Raises:
        ValueError: the model is known not to be supported.
        NotPackable: the batch has no packed form.
    """
    fused = cast(_FusedForward, _state_of(model))
    if fused.disabled_reason is not None:
        raise ValueError(fused.disabled_reason)
    layout = _layout(model, fused, kwargs)
    _switch_attention(model, fused)
    head.install(head.head_of(model))
    inputs = attention.packed_inputs(model, layout, kwargs["input_ids"])
    inputs |= {name: convert(inputs[name]) for name in ("input_ids", "position_ids")}
    tensors = {name: x for name, x in vars(layout).items() if isinstance(x, Tensor) and name != "rows"}
    batch = _RunnableBatch(replace(layout, **{name: convert(x) for name, x in tensors.items()}), inputs, {})
    fused.choose = lambda *args: batch


def _state_of(model: nn.Module) -> _FusedForward | None:
    return vars(model).get(ATTRIBUTE)


def _model_of(model: nn.Module, integration: str) -> PreTrainedModel | None:
    """The model, or the one inside of it, that has the fused forward of this integration."""
    installed = (m for m in model.modules() if m in _models)
    matching = (m for m in installed if vars(m)[ATTRIBUTE].request.integration == integration)
    return cast("PreTrainedModel | None", next(matching, None))


def _call(model: PreTrainedModel, fused: _FusedForward, args: tuple, kwargs: dict) -> object:
    batch = fused.choose(model, fused, args, kwargs)
    if batch is not None:
        return fused.make_output(_score(model, fused, batch, kwargs), kwargs)
    if fused.prior_scores:
        return fused.prior_forward(*args, fused_lm_head=True, **kwargs)
    return _prior_logits(fused, args, kwargs)


def _choose(model: PreTrainedModel, fused: _FusedForward, args: tuple, kwargs: dict) -> _RunnableBatch | None:
    """Decides how a call runs, verifies it, and counts it. Returns None, with a logged reason, if it falls back.

    Ranks that run a model together must run the same modules in the same order. In their first call
    they agree on whether the model is supported (`_model_reason`). Any other reason is `own`: a rank may
    have it alone, and then runs the modules on its padded batch.
    """
    fused.was_called = True
    batch, path, reason = None, "stock", None
    own = call_reason = None if _disabled_reason(model, fused) else _call_reason(model, fused, args, kwargs)
    if call_reason is None or support.is_sharded(model):
        reason = _model_reason(model, fused, _device_of(model, args, kwargs))
    if reason is None and call_reason is None:
        try:
            batch, path = _packed(model, fused, kwargs), "fused"
        except NotPackable as error:
            own = error.reason
    if reason is None and own is not None and support.is_sharded(model):
        # The model's own forward, which `prior_forward` is otherwise, runs the same modules.
        batch = _padded(model, fused, args, kwargs) if fused.prior_scores or call_reason is None else None
        path = "stock" if batch is None else "padded"
    if batch is not None and fused.request.is_compared and torch.is_grad_enabled() not in fused.verified:
        reason = fused.disabled_reason = _verify(model, fused, batch, args, kwargs)
        if reason is not None:
            _restore(model, fused)
            batch, path = None, "stock"
    integration = fused.request.integration
    calls[integration, _kind_of_call(model, fused), path] += 1
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(ids, Tensor):
        fallback.count_tokens(integration, ids.numel(), batch.layout.token_index.numel() if batch else ids.numel())
    if reason is not None or own is not None:
        _log_once(fused, cast(Reason, reason or own))
    return batch


def _disabled_reason(model: PreTrainedModel, fused: _FusedForward) -> Reason | None:
    return fused.disabled_reason or (None if model in _models else Reason("copied-model"))


def _call_reason(model: PreTrainedModel, fused: _FusedForward, args: tuple, kwargs: dict) -> Reason | None:
    """Why the fused forward cannot take a call."""
    request = fused.request
    others = images.ARGUMENTS if request.images else ()
    reason = support.call_unsupported_reason(model, args, kwargs, float32_head=request.float32_head, others=others)
    return reason or images.unsupported_reason(model, kwargs)


def _device_of(model: PreTrainedModel, args: tuple, kwargs: dict) -> torch.device:
    """The device of a call's arguments."""
    given = (kwargs.get("input_ids"), *args, *kwargs.values())
    return next((x.device for x in given if isinstance(x, Tensor)), model.device)


def _score(model: PreTrainedModel, fused: _FusedForward, batch: _RunnableBatch, kwargs: dict) -> ScoredBatch:
    """Runs the backbone on the batch and the head on its scored
    positions, and restores the padded shape.
    """
    request, layout = fused.request, batch.layout
    routed = returns_router_logits(model, kwargs)
    options = {"output_router_logits": True} if routed else {}
    with towers.sharing(model, batch.images):
        output = backbone(model)(*batch.args, **batch.inputs, **options)
    lm_head = head.head_of(model)
    hidden = output.last_hidden_state.flatten(0, 1)  # [T, D]
    hidden = hidden.index_select(0, layout.score_index).to(head.device_of(lm_head))  # [N, D]
    autocast = nullcontext()
    if request.float32_head:
        hidden, autocast = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
    softcap, logit_scale = fused.logit_transform
    with autocast, head.bare(lm_head) if batch.bare_head else nullcontext():
        scored = lm_head(
            hidden,
            fastdpo_targets=layout.targets.to(hidden.device),
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=request.temperature,
            outputs=request.outputs,
            memory_budget=request.memory_budget,
        )
    logps = TokenLogps(**{name: layout.unpack(x) for name, x in scored._asdict().items() if x is not None})
    label_mask = _shifted_labels(kwargs).to(hidden.device) != packing.IGNORE_INDEX
    return ScoredBatch(logps, label_mask, output.router_logits if routed else None, layout.multiplicity[None])


def _shifted_labels(kwargs: dict) -> Tensor:
    """The target of each position, [R, W]."""
    return kwargs["labels"][:, 1:] if kwargs.get("shift_labels") is None else kwargs["shift_labels"]


def _verify(
    model: PreTrainedModel, fused: _FusedForward, batch: _RunnableBatch, args: tuple, kwargs: dict
) -> Reason | None:
    """Compares a call that is about to run with the same call of the prior forward.

    Returns why all calls go to the prior forward from now on. Only a trial has such a reason.

    Raises:
        VerificationError: they differ, and this is no trial.
    """
    request = fused.request
    name, is_trial = f"{request.integration} ({request.role})", not request.verify
    functions = ", ".join(request.changed)
    fused.verified.add(torch.is_grad_enabled())

    @contextmanager
    def as_before() -> Iterator[None]:
        _restore(model, fused)
        try:
            yield
        finally:
            _switch_attention(model, fused)
            _install_head(model, fused)

    obstacle = None
    if support.is_sharded(model):
        fused.verified.update((True, False))
        obstacle = Reason("verified-ranks")
    else:
        try:
            verification.verify(
                model,
                name,
                _shifted_labels(kwargs) != packing.IGNORE_INDEX,
                stock=lambda: _prior_results(fused, args, kwargs),
                fused=lambda: _fused_results(model, fused, batch, kwargs),
                as_before=as_before,
                is_random=fused.probe_result is not None and fused.probe_result.is_random,
            )
            fallback.outcomes[fused.request.integration, "verified"] += 1
        except verification.NotComparable:
            obstacle = Reason("verified-checkpoints")
        except verification.VerificationError as error:
            if not is_trial:
                raise
            finding = f"its first call differs from stock in {error.differences}"
            return Reason("changed-calls", functions=functions, finding=finding)
    if obstacle is not None and request.changed:
        finding = f"its calls cannot be compared with stock ones: {obstacle}"
        return Reason("changed-calls", functions=functions, finding=finding)
    if obstacle is not None:
        fallback.report(f"{name}: not verified, {obstacle.named}")
    return None


def _fused_results(
    model: PreTrainedModel, fused: _FusedForward, batch: _RunnableBatch, kwargs: dict
) -> tuple[TokenLogps, dict[str, Tensor]]:
    scored = _score(model, fused, batch, kwargs)
    return scored.logps, _other_results(fused, fused.make_output(scored, kwargs)) if fused.prior_scores else {}


def _other_results(fused: _FusedForward, output: Any) -> dict[str, Tensor]:
    """What a model that scores returns next to the results of tokens, such as its loss, if its code has changed.

    A result that is new is among them.
    """
    own = ("log_probs", *fused.request.outputs)
    return {name: x for name, x in output.items() if name not in own} if fused.request.changed else {}


def _prior_results(fused: _FusedForward, args: tuple, kwargs: dict) -> tuple[TokenLogps, dict[str, Tensor]]:
    """What the prior forward computes of a batch, [R, W]."""
    statistics = fused.request.outputs
    if fused.prior_scores:
        output = fused.prior_forward(*args, fused_lm_head=True, **kwargs)
        logps = TokenLogps(output.log_probs, **{name: getattr(output, name) for name in statistics})
        return logps, _other_results(fused, output)
    logits = _prior_logits(fused, args, kwargs).logits
    logits = logits[:, :-1] if kwargs.get("shift_labels") is None else logits
    targets = _shifted_labels(kwargs).to(logits.device)
    temperature = fused.request.temperature
    return definitions.token_logps(logits, targets, temperature=temperature, outputs=("logps", *statistics)), {}


def _prior_logits(fused: _FusedForward, args: tuple, kwargs: dict) -> Any:
    return fused.prior_forward(*args, **{name: x for name, x in kwargs.items() if name not in SCORING_ARGUMENTS})


def _model_reason(model: PreTrainedModel, fused: _FusedForward, device: torch.device) -> Reason | None:
    """Returns why the model is not supported, whatever a call is given. Ranks that run it together get the
    same result.

    A model whose structure has changed is examined again, before anything is computed with it, unless
    ranks run it together: it may have changed on this rank alone.
    """
    disabled = _disabled_reason(model, fused)
    if disabled is not None:
        if not fused.probe_results:  # other ranks may not have this reason
            fused.probe_results[fused.examined] = fused.probe_result = _examine(model, fused, device)
        return disabled
    structure = fused.examined = fused.structure.hash(model)
    results = fused.probe_results
    if structure not in results and not (results and support.is_sharded(model)):
        if len(results) >= MAX_PROBE_RESULTS:
            results.clear()
            fused.image_batches.results.clear()
        results[structure] = _examine(model, fused, device)
    fused.probe_result = results.get(structure, fused.probe_result)
    reason = fused.unsupported_reason()
    if reason is not None:
        _restore(model, fused)
    return reason


def _install_head(model: PreTrainedModel, fused: _FusedForward) -> None:
    head.install(head.head_of(model))
    if next(fused.structure.modules_of(FSDPModule), None) is not None:
        output_dtypes.keep(model, head.head_of(model))


def _examine(model: PreTrainedModel, fused: _FusedForward, device: torch.device) -> ProbeResult:
    reason = support.shared_reason(
        model,
        _disabled_reason(model, fused)
        or support.unsupported_reason(model)
        or support.scoring_unsupported_reason(model, float32_head=fused.request.float32_head),
    )
    if reason is not None:
        return ProbeResult(reason)
    reason = support.shared_reason(model, _installing_reason(model, fused))
    if reason is not None:
        return ProbeResult(reason)
    result = probe.probe(model, device)
    if result.unsupported_reason is None and not fused.prior_scores:
        reason = support.shared_reason(model, probe.head_difference(model, device))
        result = result._replace(unsupported_reason=reason)
    return result


def _installing_reason(model: PreTrainedModel, fused: _FusedForward) -> Reason | None:
    """Why the packed attention or the head cannot be installed: the package has other names than the tested ones."""
    try:
        _switch_attention(model, fused)
        head.install(head.head_of(model))
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        return Reason("cannot-install", model=type(model).__name__, error=f"{type(error).__name__}: {error}")
    finally:
        head.restore(head.head_of(model))
    return None


def _switch_attention(model: PreTrainedModel, fused: _FusedForward) -> None:
    if not attention.is_switched(model):
        fused.prior_attention = attention.switch(model)


def _restore(model: PreTrainedModel, fused: _FusedForward) -> None:
    if fused.prior_attention is not None:
        attention.restore(model, fused.prior_attention)
        fused.prior_attention = None
    head.restore(head.head_of(model))
    output_dtypes.restore(model, head.head_of(model))


def _packed(model: PreTrainedModel, fused: _FusedForward, kwargs: dict) -> _RunnableBatch:
    """The packed batch. One with images is examined before it is run, as the model was before.

    Raises:
        NotPackable: the batch has no packed form, or the model does not run packed as it is now.
    """
    if fused.examined not in fused.probe_results:
        raise NotPackable(Reason("changed-model"))
    if model.training and cast(ProbeResult, fused.probe_result).attention_dropout:
        raise NotPackable(Reason("attention-dropout"))
    _switch_attention(model, fused)
    _install_head(model, fused)
    found = images.images_of(kwargs)
    if found is None:
        layout = _layout(model, fused, kwargs)
        return _RunnableBatch(layout, attention.packed_inputs(model, layout, kwargs["input_ids"]), {})
    if support.is_sharded(model):
        raise NotPackable(Reason("image-ranks"))

    make_layout = functools.partial(_layout, model, fused, kwargs, groups="pairs")
    share_random = fused.request.share_prompts != "deterministic"
    packed = fused.image_batches.pack(model, fused.examined, found, kwargs, make_layout, share_random=share_random)
    return _RunnableBatch(*packed, found.of_images)


def _padded(model: PreTrainedModel, fused: _FusedForward, args: tuple, kwargs: dict) -> _RunnableBatch | None:
    """How a call runs padded, with the fused head, next to ranks that run their packed batches. None if
    it has no labels.

    The backbone gets all that the call was given, as from TRL's forward. That forward reads the weight of
    the head, so if others have added hooks to the head or replaced its forward, they do not run here either.
    """
    shifted = kwargs.get("shift_labels") is not None
    labels = kwargs.get("shift_labels" if shifted else "labels")
    if labels is None:
        return None
    mask = kwargs.get("attention_mask")
    mask = mask if isinstance(mask, Tensor) and mask.shape == labels.shape else torch.ones_like(labels)
    layout = packing.padded_layout(labels, mask, labels, shifted)
    bare = support.scoring_unsupported_reason(model, float32_head=fused.request.float32_head) is not None
    if not bare:
        _install_head(model, fused)
    return _RunnableBatch(layout, images.padded_inputs(kwargs), {}, args, bare)


def _layout(
    model: PreTrainedModel, fused: _FusedForward, kwargs: dict, *, groups: Groups | None = None, share: bool = True
) -> Layout:
    batch, requested = padded_batch(kwargs), fused.request.share_prompts
    share = share and requested is not False
    if share and requested == "deterministic" and model.training and _is_random(model, fused):
        share, reason = False, Reason("dropout")
        if not fused.has_logged_dropout:
            fused.has_logged_dropout = True
            name, role = fused.request.integration, fused.request.role
            logger.info("fastdpo: %s (%s): prompts are not shared, %s", name, role, reason.named)
    # All positions of the padded rows count, padding included.
    width = batch.input_ids.shape[1]
    reach = None if support.rope_reason(model, width) is None else width
    groups = (groups or fused.request.groups) if share else None
    return layout_of(batch, groups=groups, store_all=returns_router_logits(model, kwargs), reach=reach)


def _is_random(model: PreTrainedModel, fused: _FusedForward) -> bool:
    """Whether training is random. The probe misses dropout in an
    adapter whose weights are still zero.
    """
    seen = fused.probe_result is not None and fused.probe_result.is_random
    return seen or any(module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout))


def _kind_of_call(model: PreTrainedModel, fused: _FusedForward) -> str:
    kind = fallback.kind_of_calls()
    if kind is not None:
        return kind
    if fused.request.role == "reference" or _adapter_is_reference(model):
        return "reference"
    if torch.is_grad_enabled():
        return "policy"
    return fused.request.kind_without_gradient if model.training else "eval"


def _adapter_is_reference(model: PreTrainedModel) -> bool:
    """Whether PEFT's adapters are disabled, or switched to the copy that TRL names "ref"."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = next((m for m in model.modules() if isinstance(m, BaseTunerLayer)), None)
    return layer is not None and (layer.disable_adapters or "ref" in layer.active_adapters)


def _log_once(fused: _FusedForward, reason: Reason) -> None:
    """Reports a fallback, each reason once. In strict mode, raises each time."""
    if fallback.strict() or reason not in fused.logged:
        fused.logged.add(reason)
        fallback.report(f"{fused.request.integration} ({fused.request.role}): not fused, {reason.named}")
