"""The wrapper of a causal LM's `forward` that every trainer is entered through.

`model(input_ids, attention_mask, labels, fused_lm_head=True)` packs the padded batch, runs the model's own backbone on
the packed tokens, scores only labelled positions, and answers with per-token results in the padded shape. Any other
call, and any batch that does not qualify, goes to the forward that the model had before.

It all happens inside `model(...)`, so that the hooks of DDP, FSDP2, ZeRO-3, PEFT and autocast see an ordinary call.
"""

from __future__ import annotations

import inspect
import logging
import operator
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .. import attention, packing
from ..ops.linear_logps import MEMORY_BUDGET
from ..ops.results import TokenLogps
from ..packing import Layout, NotPackable
from . import heads, qualify
from .structure import Structure

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, Trainer

logger = logging.getLogger("fastdpo")

calls: Counter[tuple[str, str, str]] = Counter()
"""How often each path ran: (integration, "policy" | "reference" | "eval", path) to calls.

The path is "fused", "stock", or "padded": scored by the fused head, but not packed, where ranks run a model together
and so can't take different paths.
"""

UNDERSTOOD = {
    *("input_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch"),
    *("output_router_logits", "use_cache", "return_dict"),
}
"""Arguments of a call that the fused path takes or can do without."""

SCORING = {"labels", "shift_labels", "num_items_in_batch"}
"""Those of them that a model's own forward is not given: all that is wanted of it is logits."""

VERDICTS = 16
"""So many verdicts on a model are remembered, for what is switched there and back."""

WRAPPERS = ("accelerate.", "torch.", "deepspeed.", "fastdpo.")
"""Packages that put precisions, devices and counters around a forward, but no other logits."""


class NotFused(RuntimeError):
    """`FASTDPO_STRICT=1`: a fused path would have been off. The message is the reason."""


@dataclass(frozen=True)
class Options:
    """What `patch()` was asked for.

    Attributes:
        share_prompts: compute tokens that the two answers of a prompt have in common once.
        memory_budget: bytes of the head's gradient tiles to keep from forward to backward.
        reference_memory: remember the reference's log-probabilities of each pair; a directory, if beyond the process.
    """

    share_prompts: bool = True
    memory_budget: int = MEMORY_BUDGET
    reference_memory: bool | Path = False


class Request(NamedTuple):
    """What a trainer wants of its fused head."""

    outputs: tuple[str, ...]
    temperature: float
    float32_head: bool
    softcap: float | None
    logit_scale: float


class Scored(NamedTuple):
    """The answer to one call: per-token results `[R, W]`, where labels are, and what a router's loss is made of.

    `router_logits` of each layer, of T packed tokens that stand for `router_weights` [1, T] tokens of the batch.
    """

    logps: TokenLogps
    label_mask: Tensor
    router_logits: tuple[Tensor, ...] | None
    router_weights: Tensor


class _Plan(NamedTuple):
    """How a call is run: packed as its layout says, or padded as it came, with what the layout says is scored."""

    layout: Layout
    packed: bool


@dataclass
class _Wrapper:
    """What the wrapped forward of one model needs to know. Lives on the model."""

    integration: str
    role: str  # "policy" or "reference"
    request: Request
    options: Options
    answer: Callable[[Scored, dict], object]
    stock: Callable  # the forward before ours
    off: str | None  # why every call goes to it, whatever becomes of the model
    plan: Callable[..., _Plan | None]
    stock_scores: bool
    inner: _Wrapper | None  # of ours, that somebody has wrapped since
    prior_attention: str | None = None
    forward: Callable | None = None  # ours
    structure: Structure = field(default_factory=Structure)
    verdicts: dict[int, qualify.Found] = field(default_factory=dict)  # by what the model consisted of when it was run
    found: qualify.Found | None = None  # the verdict on the model as it is; None before its first call
    said: set[str] = field(default_factory=set)


T = TypeVar("T")


class Latest(Generic[T]):
    """What was made last, kept for the next call with the same tensors: the reference's, after the policy's.

    Layouts are found again by the tensors that they were made for.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._versions: list[int] = []
        self._made: T | None = None

    def get(self, tensors: tuple[Tensor, ...], make: Callable[[], T]) -> T:
        if any(x.is_inference() for x in tensors):  # they may have been written to
            return make()
        versions = [x._version for x in tensors]
        same = versions == self._versions and all(map(operator.is_, tensors, self._tensors))
        if self._made is None or not same:
            self._tensors, self._versions, self._made = tensors, versions, make()
        return self._made


_models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_kind: ContextVar[str | None] = ContextVar("fastdpo_kind", default=None)


@contextmanager
def kind_of_calls(kind: str) -> Iterator[None]:
    """Calls made meanwhile are counted as this kind, whatever they look like."""
    token = _kind.set(kind)
    try:
        yield
    finally:
        _kind.reset(token)


def strict() -> bool:
    return os.environ.get("FASTDPO_STRICT", "0") not in ("", "0")


def install(
    model: PreTrainedModel,
    integration: str,
    role: str,
    request: Request,
    options: Options,
    answer: Callable[[Scored, dict], object],
    *,
    stock_scores: bool = True,
) -> None:
    """Wraps the forward of a model. If the model does not qualify, says so: its calls are only counted then.

    `stock_scores`: the forward before ours takes `fused_lm_head` and labels. Else it is the model's own: what is not
    fused is answered with its logits, and the head that scores is probed against them.
    """
    uninstall(model)
    # A compiled model packs outside of its graphs. Decorated this late because Dynamo imports Triton.
    plan = cast(Callable[..., "_Plan | None"], torch.compiler.disable(_plan, reason="packing works on the host"))
    off = qualify.why_not(model)
    if off is None and not stock_scores:
        off = _replaced_forward(model)
    inner = vars(model).get("_fastdpo")
    wrapper = _Wrapper(integration, role, request, options, answer, model.forward, off, plan, stock_scores, inner)
    if off is not None:
        _say(wrapper, off)

    def forward(self, *args, fused_lm_head=False, **kwargs):
        wrapper = vars(self)["_fastdpo"]  # not from the closure: a deep copy has its own, with its own stock forward
        while wrapper.forward is not forward:
            wrapper = wrapper.inner
        if not fused_lm_head:
            return wrapper.stock(*args, **kwargs)
        return _fused_call(self, wrapper, args, kwargs)

    # `generate` and Trainer read the signature. Not functools.wraps: accelerate's unwrapping follows `__wrapped__`.
    forward.__signature__ = inspect.signature(type(model).forward)
    wrapper.forward = forward
    model.forward = MethodType(forward, model)
    vars(model)["_fastdpo"] = wrapper
    _models.add(model)


def is_fused(model: nn.Module) -> bool:
    """Whether calls of a model, or of the one that PEFT has wrapped, may take the fused path."""
    wrappers = (vars(module).get("_fastdpo") for module in model.modules())
    return any(isinstance(wrapper, _Wrapper) and _reason_off(wrapper) is None for wrapper in wrappers)


def is_wrapped(model: nn.Module, integration: str) -> bool:
    """Whether a model, or one that is inside of it, is wrapped for this integration."""
    return _wrapped(model, integration) is not None


ENTERED = "_fastdpo_entered"


def models_to_enter(trainer: Trainer) -> list[tuple[str, PreTrainedModel]]:
    """Role and causal LM of each model that a trainer has by now, each once.

    To be asked where its accelerator is made, and again when it is built: transformers 4 takes the policy in between.
    A model that has served another trainer is entered anew, for what this one wants of it.
    """
    from accelerate.utils import extract_model_from_parallel, is_peft_model

    entered, found = vars(trainer).setdefault(ENTERED, weakref.WeakSet()), []
    for role, name in (("policy", "model"), ("reference", "ref_model")):
        given = vars(trainer).get(name)  # without a reference, it is the policy without its adapters
        if given is None:
            continue
        model = extract_model_from_parallel(given, keep_torch_compile=False)
        if model not in entered:
            entered.add(model)
            found.append((role, cast("PeftModel", model).get_base_model() if is_peft_model(model) else model))
    return found


def _wrapped(model: nn.Module, integration: str) -> PreTrainedModel | None:
    """The model, or the one inside of it, that is wrapped for this integration."""
    found = (m for m in model.modules() if m in _models and vars(m)["_fastdpo"].integration == integration)
    return cast("PreTrainedModel | None", next(found, None))


def reason_off(model: nn.Module, integration: str) -> str | None:
    """Why every call of a wrapped model goes to stock's path; None if that is not so, or not known yet."""
    base = _wrapped(model, integration)
    return None if base is None else _reason_off(vars(base)["_fastdpo"])


def _reason_off(wrapper: _Wrapper) -> str | None:
    return wrapper.off or (wrapper.found.wrong if wrapper.found is not None else None)


def decline(model: nn.Module, integration: str, reason: str) -> None:
    """Counts and says a call that an integration leaves to stock's path before the model sees it."""
    base = cast("PreTrainedModel", _wrapped(model, integration))
    wrapper = vars(base)["_fastdpo"]
    calls[integration, _kind_of_call(base, wrapper), "stock"] += 1
    _say(wrapper, _reason_off(wrapper) or reason)


def router_loss(config: PretrainedConfig, scored: Scored) -> Tensor:
    """The load-balancing loss of a mixture of experts, over the real tokens of the batch."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    # Its mask weighs tokens: a shared one counts as often as it stands in the batch.
    router_logits = cast(tuple[Tensor], scored.router_logits)
    experts = getattr(config, "num_experts", None) or config.num_local_experts  # Mixtral's name in transformers 4
    weights = scored.router_weights
    return cast(Tensor, load_balancing_loss_func(router_logits, experts, config.num_experts_per_tok, weights))


def uninstall(model: PreTrainedModel) -> None:
    """Gives a model its former forwards and attention back, one copied from a wrapped model too."""
    wrapper = vars(model).get("_fastdpo")
    if not isinstance(wrapper, _Wrapper):
        return
    _models.discard(model)
    if getattr(model.forward, "__func__", None) is wrapper.forward:
        del model.forward, vars(model)["_fastdpo"]
        if wrapper.stock != model.forward:  # not the class's own
            model.forward = wrapper.stock
        if wrapper.inner is not None:
            vars(model)["_fastdpo"] = wrapper.inner
    else:  # somebody wrapped it after us: stay in their chain, and only pass calls on
        wrapper.off = "fastdpo was unpatched"
    _leave(model, wrapper)


def _enter(model: PreTrainedModel, wrapper: _Wrapper) -> None:
    """Gives a model the packed attention, and its head the scoring of targets, if it hasn't them already."""
    _switch(model, wrapper)
    heads.install(heads.head_of(model))


def _switch(model: PreTrainedModel, wrapper: _Wrapper) -> None:
    if not attention.is_switched(model):
        wrapper.prior_attention = attention.switch(model)


def _leave(model: PreTrainedModel, wrapper: _Wrapper) -> None:
    if wrapper.prior_attention is not None:
        if attention.is_switched(model):  # else somebody has set another since
            attention.restore(model, wrapper.prior_attention)
        wrapper.prior_attention = None
    heads.restore(heads.head_of(model))


def uninstall_all(integration: str) -> None:
    """Every living model that was wrapped for this integration."""
    for model in list(_models):
        if vars(model)["_fastdpo"].integration == integration:
            uninstall(model)


def _fused_call(model: PreTrainedModel, wrapper: _Wrapper, args: tuple, kwargs: dict) -> object:
    plan = wrapper.plan(model, wrapper, args, kwargs)
    if plan is None:
        if wrapper.stock_scores:
            return wrapper.stock(*args, fused_lm_head=True, **kwargs)
        return wrapper.stock(*args, **{name: x for name, x in kwargs.items() if name not in SCORING})
    return wrapper.answer(_score(model, wrapper, plan, kwargs), kwargs)


def _plan(model: PreTrainedModel, wrapper: _Wrapper, args: tuple, kwargs: dict) -> _Plan | None:
    """How to run a call; None, counted and said, if it goes to the trainer's own path."""
    reason, plan, path = wrapper.off, None, "stock"
    if reason is not None and wrapper.found is None:  # other ranks may know nothing against it
        wrapper.found = _examine(model, wrapper, torch.device("cpu"))
    if reason is None and model not in _models:
        reason = "it is a copy of a model that was wrapped"
    if reason is None:
        reason = _why_not_this_call(model, args, kwargs)
    if reason is None:
        try:
            reason = _why_not_now(model, wrapper, kwargs["input_ids"].device)
            if reason is None:
                plan, path = _Plan(_layout(model, wrapper, kwargs), packed=True), "fused"
        except NotPackable as error:
            reason = str(error)
            if qualify.is_sharded(model):  # another rank may be able to pack its batch, and waits for the same modules
                heads.install(heads.head_of(model))
                rows, shifted = _rows(kwargs)
                plan, path = _Plan(packing.padded(*rows, shifted), packed=False), "padded"
    calls[wrapper.integration, _kind_of_call(model, wrapper), path] += 1
    if reason is not None:
        _say(wrapper, reason)
    return plan


def _rows(kwargs: dict) -> tuple[tuple[Tensor, Tensor, Tensor], bool]:
    """(ids, mask, labels), and whether the labels came shifted."""
    shifted = kwargs.get("shift_labels") is not None
    return (kwargs["input_ids"], kwargs["attention_mask"], kwargs["shift_labels" if shifted else "labels"]), shifted


def _score(model: PreTrainedModel, wrapper: _Wrapper, plan: _Plan, kwargs: dict) -> Scored:
    """The backbone on the packed tokens, the head on the scored ones, everything put back in its padded place."""
    layout, routed = plan.layout, _routed(model, kwargs)
    options = {"output_router_logits": True} if routed else {}
    if plan.packed:
        found = qualify.run(model, layout, kwargs["input_ids"], **options)
    else:
        batch = {name: kwargs[name] for name in ("input_ids", "attention_mask")}
        found = model.base_model(**batch, use_cache=False, **options)

    outputs, temperature, float32_head, softcap, logit_scale = wrapper.request
    head = heads.head_of(model)
    hidden = found.last_hidden_state.flatten(0, 1)  # [T, D]
    hidden = hidden.index_select(0, layout.score_index).to(heads.device_of(head))  # [N, D]
    outside_autocast = nullcontext()
    if float32_head:
        hidden, outside_autocast = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
    transform = {"softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    budget = wrapper.options.memory_budget
    with outside_autocast:
        targets = layout.targets.to(hidden.device)
        scored = head(hidden, fastdpo_targets=targets, **transform, outputs=outputs, memory_budget=budget)
    labels = kwargs["labels"][:, 1:] if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
    logps = TokenLogps(**{name: layout.unpack(x) for name, x in scored._asdict().items() if x is not None})
    label_mask = labels.to(hidden.device) != packing.IGNORE_INDEX
    return Scored(logps, label_mask, found.router_logits if routed else None, layout.multiplicity[None])


def _why_not_this_call(model: PreTrainedModel, args: tuple, kwargs: dict) -> str | None:
    if args:
        return "it was called with positional arguments"
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    if ids is None or mask is None:
        return "it was called without input_ids or without attention_mask"
    if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
        return "it was called without labels"
    extra = [
        name for name, value in kwargs.items() if name not in UNDERSTOOD and value is not None and value is not False
    ]
    if extra:
        return f"argument {', '.join(extra)} is not supported yet"
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        kind = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        return f"the attention mask does not say of each token whether it is padding: it is {kind}"
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        return "NEFTune's noise depends on the padded length"
    if _sequences_are_spread():
        return "sequences are spread over ranks (context or sequence parallelism)"
    return heads.unsupported_reason(heads.head_of(model))


def _sequences_are_spread() -> bool:
    """What accelerate has been told, by whichever trainer."""
    if "accelerate" not in sys.modules:
        return False
    from accelerate.state import AcceleratorState

    parallelism = AcceleratorState._shared_state.get("parallelism_config")
    return parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled)


def _replaced_forward(model: PreTrainedModel) -> str | None:
    """Why the logits of a model aren't those of its class's forward, which the head that scores is probed against."""
    forward = vars(model).get("forward")
    while forward is not None and heads.function_of(forward) is not type(model).forward:
        if not heads.module_of(forward).startswith(WRAPPERS):
            return f"its forward was replaced by {heads.name_of(forward)}"
        forward = getattr(forward, "__wrapped__", None)
    return None


def _routed(model: PreTrainedModel, kwargs: dict) -> bool:
    """Whether a router's logits are wanted, by the call or, as in the model's own forward, by its configuration."""
    asked = kwargs.get("output_router_logits")
    return bool(getattr(model.config, "output_router_logits", False) if asked is None else asked)


def _why_not_now(model: PreTrainedModel, wrapper: _Wrapper, device: torch.device) -> str | None:
    """What is known against the model as it is. One that has changed is examined again, before anything is computed."""
    consists_of = wrapper.structure.hash(model)
    if consists_of not in wrapper.verdicts:
        if wrapper.verdicts and qualify.is_sharded(model):  # on this rank perhaps alone
            if wrapper.found is not None and wrapper.found.wrong is not None:
                return wrapper.found.wrong
            raise NotPackable("the model has changed, and ranks that run it together can't examine it one by one")
        if len(wrapper.verdicts) >= VERDICTS:
            wrapper.verdicts.clear()
        wrapper.verdicts[consists_of] = _examine(model, wrapper, device)
    wrapper.found = wrapper.verdicts[consists_of]
    if wrapper.found.wrong is not None:
        _leave(model, wrapper)
        return wrapper.found.wrong
    if model.training and wrapper.found.attention_dropout:
        return "attention dropout is active"
    _enter(model, wrapper)
    return None


def _examine(model: PreTrainedModel, wrapper: _Wrapper, device: torch.device) -> qualify.Found:
    reason = qualify.agreed(model, wrapper.off or qualify.why_not(model))
    if reason is not None:
        return qualify.Found(reason)
    _switch(model, wrapper)
    found = qualify.probe(model, device)
    if found.wrong is None and not wrapper.stock_scores:
        found = found._replace(wrong=qualify.agreed(model, qualify.probe_head(model, device)))
    return found


def _drops(model: PreTrainedModel, wrapper: _Wrapper) -> bool:
    """Whether training is random. An adapter whose weights are still zero hides its dropout from the probe."""
    seen = wrapper.found is not None and wrapper.found.random
    return seen or any(module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout))


def _layout(model: PreTrainedModel, wrapper: _Wrapper, kwargs: dict) -> Layout:
    """The layout of a batch, made once for all the models that are called with the same tensors."""
    share = wrapper.options.share_prompts
    if share and model.training and _drops(model, wrapper):
        share = False  # the two copies of a prompt would have dropped different units
        if "dropout" not in wrapper.said:
            wrapper.said.add("dropout")
            logger.info("%s (%s): dropout is active, prompts are not shared", wrapper.integration, wrapper.role)
    inputs, shifted = _rows(kwargs)
    options: dict[str, Any] = {"shifted": shifted, "store_all": _routed(model, kwargs)}
    if qualify.reach_of_positions(model.config):
        options["reach"] = inputs[0].shape[1]  # padded rows have all these positions
    if any(x.is_inference() for x in inputs):
        return _pack(*inputs, share, options)
    stamp = (share, options, *(x._version for x in inputs))
    remembered = _layouts.get(inputs[-1])
    if remembered is not None:
        others, old_stamp, layout = remembered
        if old_stamp == stamp and all(ref() is x for ref, x in zip(others, inputs[:-1], strict=True)):
            return layout
    layout = _pack(*inputs, share, options)
    _layouts[inputs[-1]] = (tuple(weakref.ref(x) for x in inputs[:-1]), stamp, layout)
    return layout


def _pack(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, share: bool, options: dict) -> Layout:
    rows = len(input_ids)
    groups = torch.arange(rows, device="cpu") % (rows // 2) if share and rows and rows % 2 == 0 else None
    return packing.pack(input_ids, attention_mask, labels, groups=groups, **options)


def _kind_of_call(model: PreTrainedModel, wrapper: _Wrapper) -> str:
    named = _kind.get()
    if named is not None:
        return named
    if wrapper.role == "reference" or _adapter_is_reference(model):
        return "reference"
    if torch.is_grad_enabled():
        return "policy"
    return "reference" if model.training else "eval"


def _adapter_is_reference(model: PreTrainedModel) -> bool:
    """Whether PEFT's adapters are off, or switched to the copy that TRL names "ref"."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = next((m for m in model.modules() if isinstance(m, BaseTunerLayer)), None)
    return layer is not None and (layer.disable_adapters or "ref" in layer.active_adapters)


def _say(wrapper: _Wrapper, reason: str | None) -> None:
    """Each reason once."""
    if strict() or reason not in wrapper.said:
        wrapper.said.add(str(reason))
        say_off(f"{wrapper.integration} ({wrapper.role}): not fused, {reason}")


def say_off(text: str) -> None:
    """Logs what is off and why; under FASTDPO_STRICT=1 it is an error."""
    if strict():
        raise NotFused(f"{text} (FASTDPO_STRICT=1)")
    logger.warning("%s", text)
