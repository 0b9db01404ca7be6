"""Reads facts about a model from its configuration and modules. Nothing here judges them."""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING

from torch import nn

from . import attention
from .functions import Code, forwards_of, module_of
from .harmless import CODE, is_of
from .parts import text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

KERNELS = ("causal_conv1d", "mamba_ssm", "fla", "flash_attn", "kernels", "numpy", "einops")
"""Packages whose functions modeling files of transformers import."""


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


def has_own_code(model: PreTrainedModel) -> bool:
    """Whether classes of a model's modules, forwards in their place, or functions of their modeling files and of its
    attention come from packages that are not known.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    functions = [x for module in model.modules() for x in forwards_of(module)]
    functions += [x for x in Code(kinds).functions if isinstance(x, FunctionType | BuiltinFunctionType)]
    functions += [x for x in attention.functions_of(text_config(model))[1:] if x is not None]
    written_in = {kind.__module__ for module in model.modules() for kind in type(module).__mro__ if kind is not object}
    written_in |= {name for name in map(module_of, functions) if not is_of(name, KERNELS)}
    return not all(is_of(x, CODE) or x.partition(".")[0] in sys.stdlib_module_names for x in written_in)


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
