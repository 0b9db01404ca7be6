"""Pickles of a model with a fused forward are those of the model without it, wherever they are loaded.

The model itself stays as it is: it may be pickled between its forward and its backward, in which checkpointing runs
layers again, and other models may share its layers.

`copy.deepcopy`, which asks an object how to pickle it, copies the fused forward with the model. A `__deepcopy__` would
not do: wrappers such as PeftModel would take it for their own.
"""

from __future__ import annotations

import copy
import sys
from types import MethodType
from typing import Any

from torch import nn

from . import head
from .identity.functions import module_of

ATTRIBUTE = "_fastdpo_forward"
"""The attribute of a model that holds the state of its fused forward."""


def install(module: nn.Module) -> None:
    """Makes a module pickle without what fastdpo has set on it."""
    vars(module)[__reduce_ex__.__name__] = MethodType(__reduce_ex__, module)


def uninstall(module: nn.Module) -> None:
    """Undoes `install`."""
    vars(module).pop(__reduce_ex__.__name__, None)


def __reduce_ex__(module: nn.Module, protocol: Any) -> Any:
    """As of the module's class."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    function, arguments, state, *others = reduced
    is_copied = ATTRIBUTE in state and sys._getframe(1).f_code is copy.deepcopy.__code__
    kept = {ATTRIBUTE, "forward", __reduce_ex__.__name__} if is_copied else set()
    stock = _stock(module, state, kept)
    prior = state[ATTRIBUTE].prior_forward if ATTRIBUTE in state and ATTRIBUTE not in stock else None
    if prior is not None and prior != MethodType(type(module).forward, module) and _is_by_value():
        stock["forward"] = prior
    return function, arguments, stock, *others


def _is_by_value() -> bool:
    """Whether what is pickling takes any function, by its code, as dill and cloudpickle do. A trainer that they have
    pickled needs the forward that its package has given the model.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] not in ("dill", "cloudpickle", "ray"):
        frame = frame.f_back
    return frame is not None


def _stock(module: nn.Module, state: dict[str, Any], kept: set[str]) -> dict[str, Any]:
    """The attributes of a module without methods, hooks and the state of a fused forward that fastdpo has set."""
    state = head.stock_attributes(module, state)
    methods = {name: x for name, x in state.items() if isinstance(x, MethodType) and x.__self__ is module}
    ours = {ATTRIBUTE, *(name for name, x in methods.items() if _is_of_fastdpo(x))} - kept
    hooks = {name: x for name, x in state.items() if name.startswith(("_forward_hooks", "_forward_pre_hooks")) and x}
    numbers = {number for x in hooks.values() for number, hook in x.items() if _is_of_fastdpo(hook)}
    for name, x in hooks.items() if numbers else ():
        state[name] = type(x)((number, hook) for number, hook in x.items() if number not in numbers)
    return {name: x for name, x in state.items() if name not in ours}


def _is_of_fastdpo(function: Any) -> bool:
    return module_of(function).startswith("fastdpo.")
