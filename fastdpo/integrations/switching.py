"""What trainers do with a PeftModel in every step, without walks over the model, from what fastdpo knows of it.

By `disable_adapter` or `set_adapter`, a trainer makes the policy its own reference. PEFT looks for the layers with
adapters among all modules, and sets for every weight of an adapter whether it is trained, before and after. To learn
whether adapters are enabled, it describes each of these layers in words, which takes longer than a forward of small
layers. To unwrap the policy, accelerate looks for compiled parts in all modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from types import MethodType, SimpleNamespace
from typing import Any
from weakref import WeakSet

from torch import nn

from ..models import pickling
from ..models.adapters import adapter_modules, peft_model
from ..models.identity.contents import Container, containers_in, copy_of, is_own
from ..models.identity.functions import inner_function, module_of
from ..models.identity.structure import are_equal
from ..models.parts import find_base
from ..models.ranks.sharding import is_sharded
from ..models.state import MODELS, state_of
from .admission import packages
from .replacements import temporarily

_children_of, _parameters_of, _variables_of = map(attrgetter, ("_modules", "_parameters", "__dict__"))

_installed: WeakSet[Any] = WeakSet()


def install(model: nn.Module) -> None:
    """Replaces the two functions of the PeftModel in a model, if there is one."""
    found = peft_model(model)
    if found is not None:
        for function in (disable_adapter, set_adapter):
            vars(found).setdefault(function.__name__, MethodType(function, found))
        pickling.install(found)
        _installed.add(found)


def uninstall_unused() -> None:
    """Undoes `install` for the models that have no fused forward any more. Copies of them have none."""
    for model in list(_installed):
        if find_base(model) not in MODELS:
            _uninstall(model)


def _uninstall(model: Any) -> None:
    _installed.discard(model)
    for function in (disable_adapter, set_adapter):
        if getattr(vars(model).get(function.__name__), "__func__", None) is function:
            del vars(model)[function.__name__]
            pickling.uninstall(model)


def unwrap_at_once(trainer: Any, undo: ExitStack) -> None:
    """Until the stack is closed, has accelerate's `unwrap_model` return a PeftModel at once, unless user code has
    replaced the function.

    By itself, it looks for compiled parts in all modules, and then returns the same model.
    """
    accelerator: Any = getattr(trainer, "accelerator", None)  # ms-swift makes it later
    peft, stock = sys.modules.get("peft"), getattr(accelerator, "unwrap_model", None)
    if peft is None or stock is None or not module_of(stock).startswith("accelerate."):
        return

    def restore() -> None:
        if getattr(vars(accelerator).get("unwrap_model"), "__func__", None) is unwrap_model:
            del accelerator.unwrap_model

    accelerator.unwrap_model = MethodType(unwrap_model, accelerator)
    undo.callback(restore)


def unwrap_model(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The function of the accelerator's class, which would look for compiled parts. A copy of the accelerator has it as
    well, and a pickle that of the class.
    """
    peft = sys.modules["peft"]
    is_bare = isinstance(model, peft.PeftModel) and "_orig_mod" not in vars(model) and not (args or kwargs)
    return model if is_bare else type(accelerator).unwrap_model(accelerator, model, *args, **kwargs)


@contextmanager
def disable_adapter(model: Any) -> Iterator[None]:
    """The context of the model's class. When it begins and when it ends, it is given the status of the model and the
    switch of its adapters as they are then: code in the block may add adapters, and set others.
    """
    context = type(model).disable_adapter(model)

    def end(*error: Any) -> bool | None:
        with _knowing(model):
            return context.__exit__(*error)

    with ExitStack() as stack:
        with _knowing(model):
            context.__enter__()
        stack.push(end)
        yield


@contextmanager
def _knowing(model: Any) -> Iterator[None]:
    """In the block, a PeftModel does without walks over its layers what the context of its class calls."""
    switch = _switch_of(model)
    with ExitStack() as stack:
        if switch is not None:
            stack.enter_context(_in_tuner(model, "_enable_adapter_layers", switch.enable))
            if _peft_is_tested() and {layer.disable_adapters for layer in switch.layers} == {False}:
                status = SimpleNamespace(enabled=True)  # PEFT reads nothing else of it here
                stack.enter_context(temporarily(model, get_model_status=lambda: status))
        yield


def set_adapter(model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """The function of the model's class, which is given the switch of its adapters."""
    switch, name = _switch_of(model), "set_adapter"
    with nullcontext() if switch is None else _in_tuner(model, name, functools.partial(switch.activate, model)):
        type(model).set_adapter(model, adapter_name, *args, **kwargs)


class _Switch:
    """Switches adapters as PEFT does, which sets what is trained in a walk over the modules of each layer.

    What PEFT sets depends on what it reads, such as the names of active adapters, and on nothing that was set before.
    So it is set again without PEFT, for as long as that stays the same.

    Args:
        base: the model inside of the PeftModel.

    Attributes:
        layers: those with adapters.
    """

    def __init__(self, base: nn.Module) -> None:
        self.layers = layers = [module for _, module in adapter_modules(base)]
        known = set() if is_sharded(base) else {x for x in layers if _is_switched_by_peft(x)}
        self._remembered, self._others = [x for x in layers if x in known], [x for x in layers if x not in known]
        self._requires_grad: dict[object, list[bool]] = {}
        self._modules = [*base.modules()]
        self._parents = [x for x in self._modules if x._modules]
        self._leaves = [x for x in self._modules if not x._modules]
        self._inside = [*dict.fromkeys(x for layer in self._remembered for x in _modules_inside(layer))]
        tensors = (x for module in self._inside for x in module._parameters.values())
        self._tensors = [x for x in tensors if x is not None and x.is_leaf]
        attributes = (x for layer in layers for name, x in vars(layer).items() if is_own(name))
        self._containers = [*containers_in(attributes)]
        self._was = [[copy_of(x) if isinstance(x, Container) else x for x in each] for each in self._read()]

    def fits(self) -> bool:
        """Whether PEFT would find the same layers and set the same tensors, if the adapters were switched now."""
        return all(map(are_equal, self._read(), self._was))

    def _read(self) -> Iterator[list[Any]]:
        """What PEFT reads when it switches adapters. Other attributes of the model do not matter."""
        yield [*map(_variables_of, self.layers)]  # first, since it tells whether adapters are enabled
        yield [*map(_children_of, self._parents)]
        yield [any(map(_children_of, self._leaves))]
        yield [*map(type, self._modules)]
        yield [*map(_parameters_of, self._inside)]
        yield self._containers

    def enable(self, enabled: bool = True) -> None:
        """Enables or disables all adapters."""
        if self._repeat(enabled):
            for layer in self._remembered:
                vars(layer)["_disable_adapters"] = not enabled
                if enabled:
                    vars(layer)["_active_adapter"] = layer.active_adapters
            for layer in self._others:
                layer.enable_adapters(enabled)
        else:
            for layer in self.layers:
                layer.enable_adapters(enabled)
            self._remember(enabled)

    def activate(self, model: Any, adapter_name: str, inference_mode: bool = False) -> None:
        """Makes an adapter the only active one."""
        tuner, way = model.base_model, (adapter_name, inference_mode)
        kind = getattr(tuner, "tuner_layer_cls", ())
        is_plain = not self._others and all(isinstance(x, kind) and not x.merged for x in self._remembered)
        if is_plain and self._repeat(way):
            for layer in self._remembered:
                vars(layer)["_active_adapter"] = [adapter_name]
            tuner.active_adapter = adapter_name
        else:
            type(tuner).set_adapter(tuner, adapter_name, inference_mode=inference_mode)
            self._remember(way)

    def _repeat(self, way: object) -> bool:
        """Sets what is trained as PEFT has set it when it switched adapters in a way. Returns whether it ever has."""
        known = self._requires_grad.get(way)
        if known is None:
            return False
        for x, requires_grad in zip(self._tensors, known, strict=True):
            x.requires_grad = requires_grad
        return True

    def _remember(self, way: object) -> None:
        self._requires_grad[way] = [x.requires_grad for x in self._tensors]


def _is_switched_by_peft(layer: Any) -> bool:
    """Whether a layer is disabled, enabled and given its adapter by the functions of all adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    names = "enable_adapters", "set_adapter"
    return all(inner_function(getattr(layer, name)) is getattr(BaseTunerLayer, name, None) for name in names)


def _modules_inside(layer: Any) -> Iterator[nn.Module]:
    """The modules of a layer in whose tensors PEFT sets whether they are trained."""
    for name in layer.adapter_layer_names:
        outer = getattr(layer, name)
        yield from (x for x in outer.modules() if x is not outer or not isinstance(outer, nn.ModuleDict))


def _switch_of(model: Any) -> _Switch | None:
    """The switch of a model's adapters as it is now, if it has a fused forward and holds all of them."""
    base = find_base(model)
    fused = state_of(base)
    if base is None or base not in MODELS or fused is None:
        _uninstall(model)
        return None
    if getattr(model.base_model, "model", None) is not base:
        return None
    known = (identity.switch for identity in fused.structure.identities)
    switch = next((x for x in known if x is not None and x.fits()), None)
    if switch is None:
        switch = fused.structure.identity(base).switch = _Switch(base)
    return switch


def _in_tuner(model: Any, name: str, function: Callable) -> AbstractContextManager[None]:
    """In the block, the part of a PeftModel that has its adapters has this function, if its own is the tested one."""
    from peft.tuners.tuners_utils import BaseTuner

    tuner = model.base_model
    if not _peft_is_tested() or getattr(type(tuner), name, None) is not getattr(BaseTuner, name, type):
        return nullcontext()
    return temporarily(tuner, **{name: function})


@functools.cache
def _peft_is_tested() -> bool:
    return not packages.is_newer("peft")
