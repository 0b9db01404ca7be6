"""Pickles of a model with a fused forward are those of the model without it, wherever they are loaded.

`copy.deepcopy`, which asks a class how to pickle its objects, copies the fused forward with the model.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from .state import ATTRIBUTE, FusedForward, restore, state_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def install(model: PreTrainedModel) -> None:
    """Makes a model pickle without its fused forward, if it has one."""
    vars(model).update({function.__name__: MethodType(function, model) for function in (__reduce_ex__, __deepcopy__)})


def uninstall(model: PreTrainedModel) -> None:
    """Undoes `install`."""
    for function in (__reduce_ex__, __deepcopy__):
        vars(model).pop(function.__name__, None)


def __reduce_ex__(model: PreTrainedModel, protocol: Any) -> Any:
    """As of the model's class. The model has its own attention and its own head until its next fused call."""
    reduced: Any = type(model).__reduce_ex__(model, protocol)
    fused = cast(FusedForward, state_of(model))
    restore(model, fused)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    names = {ATTRIBUTE, __reduce_ex__.__name__, __deepcopy__.__name__}
    if getattr(model.forward, "__func__", None) is fused.forward:
        names.add("forward")
    function, arguments, state, *others = reduced
    return function, arguments, {name: x for name, x in state.items() if name not in names}, *others


def __deepcopy__(model: PreTrainedModel, memo: dict[int, Any]) -> PreTrainedModel:
    own = getattr(type(model), "__deepcopy__", None)
    if own is not None:
        return own(model, memo)
    copied = memo[id(model)] = type(model).__new__(type(model))
    vars(copied).update(copy.deepcopy(vars(model), memo))
    return copied
