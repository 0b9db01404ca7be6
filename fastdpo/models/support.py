"""Judges by a model's configuration and modules whether it can be packed.

No model is known by its name here. `probe.py` then compares a packed run with a padded one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..reasons import Reason
from . import attention
from .attachments import user_hooks
from .facts import rope_limit
from .functions import forwards_of, inner_function, module_of, name_of
from .harmless import FORWARD_WRAPPERS, is_of
from .head import head_of
from .mixers import finding
from .parts import language_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    if attention.repository(prior) not in attention.SUPPORTED_PRIORS:
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


def hooks_reason(model: PreTrainedModel) -> Reason | None:
    """Returns which hooks of user code see the activations inside of a model, or None if none does. Hooks on the head
    have a reason of their own (see `head.unsupported_reason`).
    """
    inside = (x for x in model.modules() if x is not model and x is not head_of(model))
    names = sorted({*map(name_of, user_hooks(inside))})
    return Reason("user-hooks", hooks=", ".join(names)) if names else None


def rope_reason(model: PreTrainedModel, width: int) -> Reason | None:
    """Returns that the results of a row depend on the width of its batch, if they do in a batch that is
    this wide.
    """
    limit = rope_limit(model)
    return None if limit is None or width <= limit else Reason("rope-width", limit=limit)
