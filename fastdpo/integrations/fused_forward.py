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
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .. import attention, packing
from ..ops.linear_logps import MEMORY_BUDGET, linear_logps
from ..ops.results import TokenLogps
from ..packing import Layout, NotPackable
from . import qualify

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, Trainer

logger = logging.getLogger("fastdpo")

calls: Counter[tuple[str, str, str]] = Counter()
"""How often each path ran: (integration, "policy" | "reference" | "eval", "fused" | "stock") to calls."""

UNDERSTOOD = {
    *("input_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch"),
    *("output_router_logits", "use_cache", "return_dict"),
}
"""Arguments of a call that the fused path takes or can do without."""

SCORING = {"labels", "shift_labels", "num_items_in_batch"}
"""Those of them that a model's own forward is not given: all that is wanted of it is logits."""


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


@dataclass
class _Wrapper:
    """What the wrapped forward of one model needs to know. Lives on the model."""

    integration: str
    role: str  # "policy" or "reference"
    request: Request
    options: Options
    answer: Callable[[Scored, dict], object]
    stock: Callable  # the forward before ours
    off: str | None  # why every call goes to it
    plan: Callable[..., Layout | None]
    stock_scores: bool
    inner: _Wrapper | None  # of ours, that somebody has wrapped since
    prior_attention: str | None = None
    forward: Callable | None = None  # ours
    found: qualify.Found | None = None  # by running the model; None before its first call
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
    plan = cast(Callable[..., "Layout | None"], torch.compiler.disable(_plan, reason="packing works on the host"))
    off = qualify.why_not(model)
    inner = vars(model).get("_fastdpo")
    wrapper = _Wrapper(integration, role, request, options, answer, model.forward, off, plan, stock_scores, inner)
    if wrapper.off is not None:
        _say(wrapper, wrapper.off)
    else:
        wrapper.prior_attention = attention.switch(model)

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
    return any(isinstance(wrapper, _Wrapper) and wrapper.off is None for wrapper in wrappers)


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
    return None if base is None else vars(base)["_fastdpo"].off


def decline(model: nn.Module, integration: str, reason: str) -> None:
    """Counts and says a call that an integration leaves to stock's path before the model sees it."""
    base = cast("PreTrainedModel", _wrapped(model, integration))
    wrapper = vars(base)["_fastdpo"]
    calls[integration, _kind_of_call(base, wrapper), "stock"] += 1
    _say(wrapper, wrapper.off or reason)


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
    _restore(model, wrapper)


def _restore(model: PreTrainedModel, wrapper: _Wrapper) -> None:
    if wrapper.prior_attention is not None:
        attention.restore(model, wrapper.prior_attention)
        wrapper.prior_attention = None
        _restore_head(_head(model))


def uninstall_all(integration: str) -> None:
    """Every living model that was wrapped for this integration."""
    for model in list(_models):
        if vars(model)["_fastdpo"].integration == integration:
            uninstall(model)


def _fused_call(model: PreTrainedModel, wrapper: _Wrapper, args: tuple, kwargs: dict) -> object:
    layout = wrapper.plan(model, wrapper, args, kwargs)
    if layout is None:
        if wrapper.stock_scores:
            return wrapper.stock(*args, fused_lm_head=True, **kwargs)
        return wrapper.stock(*args, **{name: x for name, x in kwargs.items() if name not in SCORING})
    return wrapper.answer(_score(model, wrapper, layout, kwargs), kwargs)


def _plan(model: PreTrainedModel, wrapper: _Wrapper, args: tuple, kwargs: dict) -> Layout | None:
    """The layout to run a call with; None, counted and said, if it goes to the trainer's own path."""
    reason, layout = wrapper.off, None
    if reason is None and model not in _models:
        reason = "it is a copy of a model that was wrapped"
    if reason is None:
        reason = _why_not_this_call(model, args, kwargs)
    if reason is None:
        reason = _why_not_found(model, wrapper, kwargs["input_ids"].device)
    if reason is None:
        try:
            layout = _layout(model, wrapper, kwargs)
        except NotPackable as error:
            reason = str(error)
    kind = _kind_of_call(model, wrapper)
    calls[wrapper.integration, kind, "stock" if layout is None else "fused"] += 1
    if layout is None:
        _say(wrapper, reason)
    return layout


def _score(model: PreTrainedModel, wrapper: _Wrapper, layout: Layout, kwargs: dict) -> Scored:
    """The backbone on the packed tokens, the head on the scored ones, everything put back in its padded place."""
    routed = _routed(model, kwargs)
    packed = qualify.run(model, layout, kwargs["input_ids"], **({"output_router_logits": True} if routed else {}))

    outputs, temperature, float32_head, softcap, logit_scale = wrapper.request
    head = _head(model)
    hidden = packed.last_hidden_state[0].index_select(0, layout.score_index).to(head.weight.device)  # [N, D]
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
    return Scored(logps, label_mask, packed.router_logits if routed else None, layout.multiplicity[None])


def _head(model: PreTrainedModel) -> nn.Linear:
    """Looked up on each call: FSDP and PEFT replace it after a trainer has been built."""
    return cast(nn.Linear, model.get_output_embeddings())


def _place_of_forward(head: nn.Module) -> str:
    """Where the head keeps what it computes: accelerate's hooks (`device_map`) move it there and call it."""
    return "_old_forward" if "_hf_hook" in vars(head) else "forward"


def _is_plain(head: nn.Module) -> bool:
    inner = vars(head).get(_place_of_forward(head))
    return type(head).forward is nn.Linear.forward and getattr(inner, "__func__", None) in (None, nn.Linear.forward)


def _install_head(head: nn.Linear) -> None:
    """Teaches a head to score targets, as a module call: engines' hooks bring its weight and take its gradient."""

    def forward(self, hidden: Tensor, fastdpo_targets: Tensor | None = None, **options) -> Tensor | TokenLogps:
        if fastdpo_targets is None:
            return nn.Linear.forward(self, hidden)
        return linear_logps(hidden, self.weight, fastdpo_targets, bias=self.bias, **options)

    setattr(head, _place_of_forward(head), MethodType(forward, head))
    vars(head)["_fastdpo"] = True


def _restore_head(head: nn.Module) -> None:
    if vars(head).pop("_fastdpo", None) is None:
        return
    if "_hf_hook" in vars(head):
        vars(head)["_old_forward"] = MethodType(nn.Linear.forward, head)
    else:
        del vars(head)["forward"]


def _why_not_this_call(model: PreTrainedModel, args: tuple, kwargs: dict) -> str | None:
    if args:
        return "it was called with positional arguments"
    if kwargs.get("input_ids") is None or kwargs.get("attention_mask") is None:
        return "it was called without input_ids or without attention_mask"
    if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
        return "it was called without labels"
    extra = [
        name for name, value in kwargs.items() if name not in UNDERSTOOD and value is not None and value is not False
    ]
    if extra:
        return f"argument {', '.join(extra)} is not supported yet"
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        return "NEFTune's noise depends on the padded length"
    head = _head(model)
    if "_fastdpo" not in vars(head):
        if not isinstance(head, nn.Linear) or not _is_plain(head):
            return f"the head must be a plain nn.Linear; it is {type(head).__name__}"
        _install_head(head)
    return None


def _routed(model: PreTrainedModel, kwargs: dict) -> bool:
    """Whether a router's logits are wanted, by the call or, as in the model's own forward, by its configuration."""
    asked = kwargs.get("output_router_logits")
    return bool(getattr(model.config, "output_router_logits", False) if asked is None else asked)


def _why_not_found(model: PreTrainedModel, wrapper: _Wrapper, device: torch.device) -> str | None:
    """What is known against the model from running it, which is done once, before anything is computed from it."""
    if wrapper.found is None:
        wrapper.found = qualify.probe(model, device)
        wrapper.off = wrapper.found.wrong
        if wrapper.off is None and not wrapper.stock_scores:
            wrapper.off = qualify.probe_head(model, device)
        if wrapper.off is not None:
            _restore(model, wrapper)
    if model.training and wrapper.found.attention_dropout:
        return "attention dropout is active"
    return wrapper.off


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
    shifted = kwargs.get("shift_labels") is not None
    inputs = (kwargs["input_ids"], kwargs["attention_mask"], kwargs["shift_labels" if shifted else "labels"])
    options = {"shifted": shifted, "store_all": _routed(model, kwargs)}
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
    groups = torch.arange(rows) % (rows // 2) if share and rows and rows % 2 == 0 else None
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
