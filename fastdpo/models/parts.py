"""The parts of a model: the transformers model inside the wrappers of PEFT and engines, and in it the
backbone, which is everything but the head, and the language model, which text passes through; and what
their configurations say.

A model of text alone is its own language model. Image and audio towers lie outside of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from .identity.functions import forwards_of, inner_function, module_of
from .identity.harmless import FORWARD_WRAPPERS, is_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PASSING = (*FORWARD_WRAPPERS, "peft", "transformers")
"""Packages whose hooks and wrappers of a causal LM pass the arguments of its calls on."""


def base_of(model: nn.Module, op: str) -> PreTrainedModel:
    """The transformers model inside a model, which PEFT, DDP or another engine may have wrapped.

    Args:
        model: the model.
        op: what needs it, for the message of the error.

    Raises:
        TypeError: there is none.
    """
    base = find_base(model)
    if base is None:
        raise TypeError(f"{op}: model must be or hold a transformers.PreTrainedModel; got {type(model).__name__}")
    return base


def find_base(model: nn.Module) -> PreTrainedModel | None:
    """As `base_of`, or None if there is no transformers model."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return cast("PreTrainedModel | None", next(filter(is_transformers_model, modules), None))


def is_transformers_model(module: object) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def modules_around(model: nn.Module) -> Iterator[nn.Module]:
    """The modules from a model to the transformers model inside of it."""
    for module in model.modules():
        yield module
        if is_transformers_model(module):
            return


def passes_arguments_on(model: nn.Module) -> bool:
    """Whether keyword arguments of a model reach the transformers model inside of it as they are.

    So they do unless code that is not known has hooks on these modules, or has replaced their forward.
    """
    is_base = False
    for module in modules_around(model):
        is_base = is_transformers_model(module)
        of_class = () if is_base else (type(module).forward,)
        before = (*of_class, *_hooks_on_arguments(module), *forwards_of(module))
        if not all(is_of(module_of(x), PASSING) for x in before):
            return False
    return is_base


class Wrapping:
    """Remembers `passes_arguments_on` of models, until a module around their transformers model changes."""

    def __init__(self) -> None:
        # By id of a model: the modules from the outermost to the transformers model, how they were, and the answer.
        self._known: dict[int, tuple[list[nn.Module], list[tuple], bool]] = {}

    def passes_arguments_on(self, model: nn.Module) -> bool:
        modules, was, passes = self._known.get(id(model), ([], None, False))
        if was != [*map(_wrapping, modules)]:
            modules = [*modules_around(model)]
            passes = passes_arguments_on(model)
            self._known[id(model)] = modules, [*map(_wrapping, modules)], passes
        return passes


def _wrapping(module: nn.Module) -> tuple:
    hooks = {**module._forward_pre_hooks}, {**module._forward_pre_hooks_with_kwargs}
    return type(module).forward, vars(module).get("forward"), [*module._modules.values()], *hooks


def unknown_wrapper(model: nn.Module) -> nn.Module | None:
    """The first module around the transformers model inside of a model that may return something else than its output,
    or None if all of them are of packages whose wrappers return it.
    """
    around = (x for x in modules_around(model) if not is_transformers_model(x))
    return next((x for x in around if not is_of(module_of(type(x).forward), PASSING)), None)


def _hooks_on_arguments(module: nn.Module) -> list[Callable]:
    """The hooks that may change keyword arguments of a module's call."""
    hooks = module._forward_pre_hooks
    return [inspect.unwrap(inner_function(hooks[key])) for key in module._forward_pre_hooks_with_kwargs if key in hooks]


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """The configuration of the language model."""
    return model.config.get_text_config()


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that has its text configuration, or the model itself if there is no such part."""
    from transformers import PreTrainedModel

    config = text_config(model)
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is config)
    return next(parts, model)


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Everything of a model but its head: its towers and its language model.

    Multimodal models of transformers 4 have it as `model`, and are their own `base_model`.
    """
    inner = getattr(model, "model", None)
    return cast("PreTrainedModel", inner if model.base_model is model and inner is not None else model.base_model)


def without_engines(model: nn.Module) -> nn.Module:
    """A model without the wrappers of DDP, FSDP, DeepSpeed and `torch.compile`."""
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model, keep_torch_compile=False)


def input_device_of(base: PreTrainedModel) -> torch.device:
    """The device that a model's inputs go to."""
    return cast(Tensor, base.get_input_embeddings().weight).device


def vocabulary_of(base: PreTrainedModel) -> int | None:
    """The number of rows of a model's token embedding, or None for an embedding of another kind."""
    return getattr(base.get_input_embeddings(), "num_embeddings", None)


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
