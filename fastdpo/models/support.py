"""Reads from a model's configuration and modules whether it can be packed, and how its head makes
logits.

No model is known by its name here. `probe.py` then compares a packed run with a padded one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..reasons import Reason
from . import attention
from .harmless import FORWARD_WRAPPERS, forwards_of, inner_function, is_of, module_of, name_of
from .head import is_hook_of_engine
from .mixers import finding
from .parts import language_model, text_config, vocabulary_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ..packing import Layout

LAYER_TYPES = {"full_attention", "sliding_attention"}

LAYER_TYPES_WITH_MIXERS = {*LAYER_TYPES, "linear_attention", "conv", "hybrid", "mlp", "moe"}


def unsupported_reason(model: PreTrainedModel) -> Reason | None:
    """Returns why a model's configuration or modules rule out packing, or None if nothing is known."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return Reason("encoder-decoder", model=name)
    if config.get_text_config() is not config:
        text = language_model(model)
        return Reason("no-language-model", model=name) if text is model else unsupported_reason(text)
    if getattr(config, "cross_attention_layers", None):
        return Reason("cross-attention", model=name)
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return Reason("bidirectional", model=name)
    if getattr(config, "alibi", False):
        return Reason("alibi", model=name)
    if not model._can_set_attn_implementation():
        return Reason("fixed-attention", model=name)
    reason = finding.unsupported_reason(model)
    if reason is not None:
        return reason
    supported_layers = LAYER_TYPES_WITH_MIXERS if finding.mixers_of(model) else LAYER_TYPES
    other_layers = set(getattr(config, "layer_types", None) or ()) - supported_layers
    if other_layers:
        return Reason("layer-types", types=", ".join(sorted(other_layers)))
    prior = attention.implementation(model)
    if not attention.is_supported(prior):
        supported = ", ".join(attention.SUPPORTED_PRIORS)
        return Reason("attention-implementation", given=prior, supported=supported)
    if getattr(config, "reorder_and_upcast_attn", False):
        return Reason("upcast-attention")
    return None


def forward_unsupported_reason(model: PreTrainedModel) -> Reason | None:
    """Returns why a model's logits are not those of its class's forward, or None if they are."""
    for forward in forwards_of(model):
        if inner_function(forward) is type(model).forward:
            break
        if not is_of(module_of(forward), FORWARD_WRAPPERS):
            return Reason("replaced-forward", function=name_of(forward))
    return None


def backward_hooks_reason(model: PreTrainedModel) -> Reason | None:
    """Returns which backward hooks the modules of a model that train have, other than those of engines, or None if
    they have none.
    """
    hooks = {
        name_of(hook)
        for module in model.modules()
        if module is not model
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
        if not is_hook_of_engine(hook) and any(x.requires_grad for x in module.parameters())
    }
    return Reason("backward-hooks", hooks=", ".join(sorted(hooks))) if hooks else None


def ids_reason(model: PreTrainedModel, layout: Layout) -> Reason | None:
    """Returns that a batch has ids outside of the model's embeddings, at which the model raises, or None.

    A packed batch has fewer tokens, maybe without these.
    """
    size, (least, largest) = vocabulary_of(model), layout.id_range or (0, 0)
    if size is None or 0 <= least <= largest < size:
        return None
    return Reason("ids-outside", least=least, largest=largest, size=size)


def rope_limit(model: PreTrainedModel) -> int | None:
    """The largest width of a batch up to which rotary embeddings do not depend on the width, or None
    if they never do.

    In wider batches, LongRoPE has other frequencies, and those of dynamic NTK depend on the width and
    on the batches before.
    """
    config = text_config(model)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    is_one = "rope_type" in parameters or "type" in parameters
    of_layer_types = [parameters] if is_one else [x for x in parameters.values() if isinstance(x, dict)]
    limits = []
    for each in of_layer_types:
        rope_type = each.get("rope_type") or each.get("type") or "default"
        if "dynamic" in rope_type:
            limits.append(config.max_position_embeddings - 1)  # frequencies are reset only below the maximum
        elif rope_type == "longrope":
            name = "original_max_position_embeddings"
            limits.append(getattr(config, name, None) or each.get(name) or config.max_position_embeddings)
    return min(limits, default=None)


def rope_reason(model: PreTrainedModel, width: int) -> Reason | None:
    """Returns that the results of a row depend on the width of its batch, if they do in a batch that is
    this wide.
    """
    limit = rope_limit(model)
    return None if limit is None or width <= limit else Reason("rope-width", limit=limit)


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether a model without its adapters has dropout, as a module or
    as an entry of its configuration.
    """
    entries = model.config.to_dict() | text_config(model).to_dict()
    if any("drop" in name and isinstance(x, float) and x > 0 for name, x in entries.items()):
        return True
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Dropout))
    return any(module.p > 0 and "lora_dropout" not in name for name, module in modules)


def attention_window(config: PretrainedConfig) -> int | None:
    """The sliding window of some or all layers in tokens, or None if the configuration has none."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    layers = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if layers is None or "sliding_attention" in layers else None


def logit_transform(config: PretrainedConfig) -> tuple[float | None, float]:
    """(softcap, logit_scale) of a model that computes `softcap *
    tanh(logit_scale * z / softcap)` after its head.
    """
    softcap = getattr(config, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere, Muse Glimmer, Falcon-H1
        if getattr(config, name, None) is not None:
            return softcap, getattr(config, name)
    scaling = getattr(config, "logits_scaling", None)  # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies
    if scaling is None:
        return softcap, 1.0
    return softcap, scaling if config.model_type == "hyperclovax" else 1 / scaling


def returns_router_logits(model: PreTrainedModel, kwargs: dict) -> bool:
    """Whether a call asks for router logits, itself or, as in the model's
    own forward, by the configuration.
    """
    requested = kwargs.get("output_router_logits")
    return bool(getattr(text_config(model), "output_router_logits", False) if requested is None else requested)
