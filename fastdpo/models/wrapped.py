"""The transformers model inside the wrappers of PEFT and engines, and its modes and adapters."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from .functions import inner_function, module_of
from .harmless import FORWARD_WRAPPERS, is_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

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


def is_transformers_model(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def passes_arguments_on(model: nn.Module) -> bool:
    """Whether keyword arguments of a model reach the transformers model inside of it as they are.

    So they do unless code that is not known has hooks on these modules, or has replaced their forward.
    """
    for module in model.modules():
        is_base = is_transformers_model(module)
        of_class = () if is_base else (type(module).forward,)
        if not all(is_of(module_of(x), PASSING) for x in (*of_class, *_in_front_of(module))):
            return False
        if is_base:
            return True
    return False


def _in_front_of(module: nn.Module) -> Iterator[Callable]:
    """The hooks that may change keyword arguments of a module's call, and what has replaced its forward."""
    for key in module._forward_pre_hooks_with_kwargs:
        if key in module._forward_pre_hooks:
            yield inspect.unwrap(inner_function(module._forward_pre_hooks[key]))
    forward = vars(module).get("forward")
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)


def without_engines(model: nn.Module) -> nn.Module:
    """A model without the wrappers of DDP, FSDP, DeepSpeed and `torch.compile`."""
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model, keep_torch_compile=False)


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that a PeftModel wraps. Any other model is returned as it is."""
    from accelerate.utils import is_peft_model

    return cast("PeftModel", model).get_base_model() if is_peft_model(model) else model


def input_device_of(base: PreTrainedModel) -> torch.device:
    """The device that a model's inputs go to."""
    return cast(Tensor, base.get_input_embeddings().weight).device


def vocabulary_of(base: PreTrainedModel) -> int | None:
    """The number of rows of a model's token embedding, or None for an embedding of another kind."""
    return getattr(base.get_input_embeddings(), "num_embeddings", None)


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Puts a model into evaluation mode for the block (see `in_mode`)."""
    return in_mode(model, training=False)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Puts a model into training or evaluation mode for the block, and each module back into its own
    mode afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def with_adapter(model: nn.Module, adapter: str | None, op: str) -> Iterator[None]:
    """Activates only this adapter of a PeftModel for the block, or none.
    Leaves any other model as it is.

    Args:
        model: the model.
        adapter: the adapter's name.
        op: what needs it, for the messages of errors.

    Raises:
        ValueError: the model has no such adapter, or one of virtual tokens.
    """
    peft_model = _peft_model(model)
    if peft_model is None:
        if adapter is not None:
            raise ValueError(f"{op}: adapter must be None without a PeftModel; got {adapter!r}")
        yield
        return
    if adapter is None:
        with peft_model.disable_adapter():
            yield
        return
    configs = peft_model.peft_config
    if adapter not in configs or configs[adapter].is_prompt_learning:
        known = [name for name, config in configs.items() if not config.is_prompt_learning]
        raise ValueError(f"{op}: adapter must be one of {known}, none of virtual tokens; got {adapter!r}")
    previous, trainable = peft_model.active_adapter, [p for p in model.parameters() if p.requires_grad]
    peft_model.set_adapter(adapter)
    try:
        yield
    finally:
        peft_model.set_adapter(cast(str, previous))
        model.requires_grad_(False)  # PEFT makes trainable whatever it activates
        for parameter in trainable:
            parameter.requires_grad_(True)


def _peft_model(model: nn.Module) -> PeftModel | None:
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel

    return next((module for module in model.modules() if isinstance(module, PeftModel)), None)
