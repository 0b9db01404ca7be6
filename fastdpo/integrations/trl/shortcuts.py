"""What TRL and PEFT ask about a model in every step, answered without a long walk over its modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ...models.functions import module_of
from ...models.parts import find_base, is_transformers_model
from ...models.sharding import is_sharded
from ...models.state import state_of
from ..admission import packages
from ..bypass import STATE
from ..line import TrainerLine
from ..replacements import temporarily

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...models.structure import Identity


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
    switch = _switch_of(model) if adapter_name is None else None
    with ExitStack() as stack:
        if switch is None or {layer.disable_adapters for layer in switch.layers} != {False}:
            stack.enter_context(stock(model, adapter_name, *args, **kwargs))
        else:
            stack.enter_context(_switched_by(switch, model))
            with _enabled_status(model):
                stack.enter_context(stock(model, adapter_name, *args, **kwargs))
        yield


class _Switch:
    """Disables and enables adapters as PEFT does, which sets what is trained in a walk over the modules of each layer.

    Args:
        layers: those with adapters.
        remembers: whether what PEFT has set once is set again without it, as long as the layers are as they were.
    """

    def __init__(self, layers: list[Any], remembers: bool) -> None:
        kinds = {kind for kind in {*map(type, layers)} if remembers and _is_switched_by_peft(kind)}
        self.layers = layers
        self._remembered = [x for x in layers if type(x) in kinds]
        self._others = [x for x in layers if type(x) not in kinds]
        self._tensors = [x for layer in self._remembered for x in _adapter_tensors(layer)]
        self._requires_grad: dict[bool, list[bool]] = {}

    def __call__(self, enabled: bool = True) -> None:
        known = self._requires_grad.get(enabled)
        for layer in self.layers if known is None else self._others:
            layer.enable_adapters(enabled)
        if known is None:
            self._requires_grad[enabled] = [x.requires_grad for x in self._tensors]
            return
        for x, requires_grad in zip(self._tensors, known, strict=True):
            x.requires_grad = requires_grad
        for layer in self._remembered:
            vars(layer)["_disable_adapters"] = not enabled


def _is_switched_by_peft(kind: type) -> bool:
    """Whether the layers of a class are disabled and enabled by the functions of all adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    names = "enable_adapters", "set_adapter"
    return all(getattr(kind, name, None) is getattr(BaseTunerLayer, name) for name in names)


def _adapter_tensors(layer: Any) -> Iterator[Tensor]:
    """The tensors of a layer for which PEFT sets whether they are trained."""
    for name in layer.adapter_layer_names:
        for x in getattr(layer, name).values():
            tensors = [x] if isinstance(x, Tensor) else x.parameters()
            yield from (tensor for tensor in tensors if tensor.is_leaf)


_switches: WeakKeyDictionary[Identity, _Switch] = WeakKeyDictionary()


def _switch_of(model: Any) -> _Switch:
    """The switch of a model's adapters as it is now."""
    base = find_base(model)
    fused = None if base is None else state_of(base)
    if base is None or fused is None:
        return _Switch(_with_adapters(x for x in model.modules() if hasattr(x, "disable_adapters")), remembers=False)
    identity = fused.structure.identity(base)
    switch = _switches.get(identity)
    if switch is None:
        layers = _with_adapters(identity.of_kind("disable_adapters"))
        switch = _switches[identity] = _Switch(layers, remembers=not is_sharded(base))
    return switch


def _with_adapters(modules: Iterable[Any]) -> list[Any]:
    # PEFT's layers have a property of this name, models of transformers a method.
    return [x for x in modules if isinstance(getattr(type(x), "disable_adapters", None), property)]


def _switched_by(switch: _Switch, model: Any) -> AbstractContextManager[None]:
    """In the block, PEFT's way to disable and enable adapters, which looks for the layers, is a switch."""
    from peft.tuners.tuners_utils import BaseTuner

    tuner, name = model.base_model, "_enable_adapter_layers"
    if not _peft_is_tested() or getattr(type(tuner), name, None) is not getattr(BaseTuner, name, type):
        return nullcontext()
    return temporarily(tuner, **{name: switch})


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
