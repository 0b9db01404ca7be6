"""What TRL and PEFT ask about a model in every step, answered without a long walk over its modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from ...models.functions import module_of
from ...models.parts import find_base, is_transformers_model
from ...models.state import state_of
from ..admission import packages
from ..bypass import STATE
from ..line import TrainerLine
from ..replacements import temporarily

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_peft_model(stock: Callable, model: Any) -> bool:
    """What accelerate returns, by the class of a model that no engine has wrapped.

    accelerate parses the metadata of PEFT and walks all modules.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return True
    is_fused = isinstance(model, nn.Module) and state_of(model) is not None
    return not (is_fused or is_transformers_model(model)) and stock(model)


def install(line: TrainerLine, trainer: Any) -> None:
    """Until the trainer is unpatched, has accelerate's `unwrap_model` return a PeftModel at once, unless user code has
    replaced the function.

    By itself, it looks for compiled parts in all modules, and then returns the same model.
    """
    state, peft = line.state_of(trainer), sys.modules.get("peft")
    accelerator: Any = getattr(trainer, "accelerator", None)  # ms-swift makes it later
    if state is None or peft is None or accelerator is None:
        return
    stock = accelerator.unwrap_model
    if not module_of(stock).startswith("accelerate."):
        return

    def unwrap_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_bare = isinstance(model, peft.PeftModel) and "_orig_mod" not in vars(model) and not (args or kwargs)
        return model if is_bare else stock(model, *args, **kwargs)

    def undo() -> None:
        if vars(accelerator).get("unwrap_model") is unwrap_model:
            del accelerator.unwrap_model

    accelerator.unwrap_model = unwrap_model
    state.undo.callback(undo)


def training_step(stock: Callable, trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The trainer's function. It sets the mode of each module of the model, which usually is set already."""
    modules = model.modules() if STATE in vars(trainer) else ()
    base = next((x for x in modules if state_of(x) is not None and "train" not in vars(x)), None)
    with nullcontext() if base is None else temporarily(base, train=MethodType(_train, base)):
        return stock(trainer, model, *args, **kwargs)


def _train(model: PreTrainedModel, mode: bool = True) -> Any:
    fused = state_of(model)
    is_set = mode and fused is not None and fused.structure.identity(model).is_training
    return model if is_set else type(model).train(model, mode)


@contextmanager
def disable_gradient_checkpointing(stock: Callable, model: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """TRL's context. To enable checkpointing again, transformers would visit all modules and add one more hook to the
    embeddings in every step, for which a compiled model is compiled again.
    """
    base = model if state_of(model) else find_base(model)
    fused = None if base is None else state_of(base)
    with ExitStack() as stack:
        if base is None or fused is None or fused.unsupported_reason() is not None:
            stack.enter_context(stock(model, *args, **kwargs))
        else:
            for layer in fused.structure.modules_of(base, "gradient_checkpointing"):
                if layer.gradient_checkpointing:
                    stack.enter_context(temporarily(layer, gradient_checkpointing=False))
        yield


@contextmanager
def use_adapter(stock: Callable, model: Any, adapter_name: str | None, *args: Any, **kwargs: Any) -> Iterator[None]:
    """TRL's context. To disable adapters, PEFT asks for the status of the model, and reads only whether they are
    enabled. The other fields describe each layer in words, which takes longer than a forward of small layers. It then
    looks for the layers with adapters among all modules, before and after.
    """
    layers = _adapter_layers(model) if adapter_name is None else []
    with ExitStack() as stack:
        are_enabled = {layer.disable_adapters for layer in layers} == {False}
        if are_enabled:
            stack.enter_context(_known_layers(model, layers))
        with _enabled_status(model) if are_enabled else nullcontext():
            stack.enter_context(stock(model, adapter_name, *args, **kwargs))
        yield


def _adapter_layers(model: Any) -> list[Any]:
    """The modules of a model that have adapters."""
    base = find_base(model)
    fused = None if base is None else state_of(base)
    if base is None or fused is None:
        modules = [x for x in model.modules() if hasattr(x, "disable_adapters")]
    else:
        modules = fused.structure.identity(base).of_kind("disable_adapters")
    # PEFT's layers have a property of this name, models of transformers a method.
    return [x for x in modules if isinstance(getattr(type(x), "disable_adapters", None), property)]


def _known_layers(model: Any, layers: list[Any]) -> AbstractContextManager[None]:
    """In the block, PEFT disables and enables adapters in these layers, which it would look for."""
    from peft.tuners.tuners_utils import BaseTuner

    tuner, name = model.base_model, "_enable_adapter_layers"
    if not _peft_is_tested() or getattr(type(tuner), name, None) is not getattr(BaseTuner, name, type):
        return nullcontext()

    def enable(enabled: bool = True) -> None:
        for layer in layers:
            layer.enable_adapters(enabled)

    return temporarily(tuner, **{name: enable})


@functools.cache
def _peft_is_tested() -> bool:
    return not packages.is_newer("peft")


class _EnabledStatus:
    """The status of a model whose adapters are enabled. Other fields are computed when they are read."""

    enabled = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self._model).get_model_status(self._model), name)


@contextmanager
def _enabled_status(model: Any) -> Iterator[None]:
    """In the block, a model's `get_model_status` returns an `_EnabledStatus`.

    A compiled model would pass an attribute that is set on to the model inside, and keep it there.
    """
    vars(model)["get_model_status"] = lambda: _EnabledStatus(model)
    try:
        yield
    finally:
        del vars(model)["get_model_status"]
