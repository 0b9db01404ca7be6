"""Finds the mixers of a model by what their forwards take and call, not by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from ...reasons import Reason
from ..identity.functions import forwards_of, inner_function
from ..parts import language_model
from . import known

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASKS = {"attention_mask", "conv_mask"}
"""Names of the arguments by which transformers passes padding masks to mixers."""

ATTENTION = "ALL_ATTENTION_FUNCTIONS"
"""The table of transformers in which a module that attends looks up its attention implementation."""


def mixers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The innermost modules of a model that take hidden states and a padding mask, and in which nothing
    attends.

    A layer without a mixer may take a mask too, and not use it. It is told from a mixer by other
    layers of its class, which contain one.
    """
    modules = _modules(model)
    masked = [module for module in modules if _takes_mask(type(module))]
    attends = {module for module in modules if any(_attends(type(inner)) for inner in module.modules())}
    containers = {type(x) for x in masked if x in attends or {*masked} & {*x.modules()} != {x}}
    return [module for module in masked if type(module) not in containers]


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that call the model's attention implementation."""
    return [module for module in _modules(model) if _attends(type(module))]


def functions_of(mixer: nn.Module) -> dict[str, Any]:
    """The known functions that a mixer's forward names, without the wrappers that `switch` sets."""
    forward = forward_of(type(mixer))
    names = known.WRAPPED & set(forward.__code__.co_names) & forward.__globals__.keys()
    return {name: known.function_inside(known.original_of(forward.__globals__[name])) for name in sorted(names)}


def called_by(mixer: nn.Module) -> frozenset[str]:
    """The names of the known functions that a mixer must call on packed tokens. None of them if it runs
    on whole rows: it calls no known function, or one that cannot take packed tokens, or a kernel has replaced
    its forward.
    """
    for forward in forwards_of(mixer):
        if getattr(forward, "__wrapped__", None) is None and inner_function(forward) is not type(mixer).forward:
            return frozenset()
    file = forward_of(type(mixer)).__globals__["__name__"]
    functions = {name: x for name, x in functions_of(mixer).items() if name not in known.WHOLE_MIXERS}
    packed = all(known.runs_packed(name, x, file) for name, x in functions.items())
    return frozenset(functions) if packed else frozenset()


def unsupported_reason(model: PreTrainedModel) -> Reason | None:
    """Why a model mixes tokens outside of its attention and its mixers, as far as its modules say."""
    mixers = mixers_of(model)
    inside = {module for mixer in mixers for module in mixer.modules()}
    convolutions = {module for module in model.modules() if isinstance(module, nn.Conv1d)} - inside
    if convolutions or (getattr(model, "_is_stateful", False) and not mixers):
        return Reason("other-mixing", model=type(model).__name__)
    return None


def forward_of(kind: type[nn.Module]) -> FunctionType:
    """The forward of a class inside its decorators."""
    forward: Callable = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    if code is not None and "forward_func" in code.co_freevars:  # a decorator of transformers 5.15 and 5.16
        forward = inspect.getclosurevars(forward).nonlocals["forward_func"]
    return forward  # pyright: ignore[reportReturnType]


def _modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of the language model, without it and the models inside of it."""
    from transformers import PreTrainedModel

    return [module for module in language_model(model).modules() if not isinstance(module, PreTrainedModel)]


def _takes_mask(kind: type[nn.Module]) -> bool:
    code = getattr(forward_of(kind), "__code__", None)
    if code is None:
        return False
    _, *arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return bool(MASKS & set(arguments[1:]))  # positional embeddings may take a mask first


def _attends(kind: type[nn.Module]) -> bool:
    code = getattr(forward_of(kind), "__code__", None)
    return code is not None and ATTENTION in code.co_names
