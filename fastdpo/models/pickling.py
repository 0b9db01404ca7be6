"""Pickles of a model with a fused forward are those of the model without it, wherever they are loaded.

`copy.deepcopy`, which asks an object how to pickle it, copies the fused forward with the model. A `__deepcopy__` would
not do: wrappers such as PeftModel would take it for their own.
"""

from __future__ import annotations

import copy
import sys
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from .state import ATTRIBUTE, FusedForward, restore, state_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def install(model: PreTrainedModel) -> None:
    """Makes a model pickle without its fused forward, if it has one."""
    vars(model)[__reduce_ex__.__name__] = MethodType(__reduce_ex__, model)


def uninstall(model: PreTrainedModel) -> None:
    """Undoes `install`."""
    vars(model).pop(__reduce_ex__.__name__, None)


def __reduce_ex__(model: PreTrainedModel, protocol: Any) -> Any:
    """As of the model's class. The model has its own attention and its own head until its next fused call."""
    reduced: Any = type(model).__reduce_ex__(model, protocol)
    if sys._getframe(1).f_code is copy.deepcopy.__code__:
        return reduced
    fused = cast(FusedForward, state_of(model))
    restore(model, fused)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    names = {ATTRIBUTE, __reduce_ex__.__name__}
    if getattr(model.forward, "__func__", None) is fused.forward:
        names.add("forward")
    function, arguments, state, *others = reduced
    return function, arguments, {name: x for name, x in state.items() if name not in names}, *others
