"""Code that others have attached to the modules of a model: hooks, and forwards that replace those of classes.

A hook of user code on a module inside of the model, or a forward in the place of its own, sees the arguments and the
outputs of that module, which are packed tokens in a fused call. Such a model runs as the trainer's own path has it for
as long as the hook is there. What is attached to the model itself sees its padded calls, and may stay unless it expects
logits that a fused call does not compute. Hooks on parameters see the gradients of a step, and may stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator

from torch import nn
from torch.nn.modules import module as hooks_of_all_modules

from . import harmless
from .functions import closure_contents, inner_function, is_named_hook, module_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold its hooks. For those of every module, torch has dictionaries of like names."""

PLAIN = (bool, int, float, str, type(None))

_hooks_of_all: list[dict[int, Callable]] = [getattr(hooks_of_all_modules, f"_global{name}") for name in HOOKS]


def hooks_of(module: nn.Module, names: Iterable[str] = HOOKS) -> Iterator[Callable]:
    """The hooks in these attributes of a module, and those of accelerate, which are objects."""
    for name in names:
        yield from vars(module)[name].values()
    hook = vars(module).get("_hf_hook")
    yield from getattr(hook, "hooks", () if hook is None else (hook,))  # one may stand for several


def hooks_of_every_module() -> list[Callable]:
    """Those of `torch.nn.modules.module.register_module_forward_hook` and of its relatives."""
    return [hook for hooks in _hooks_of_all if hooks for hook in hooks.values()]


def is_hook_of_engine(hook: Callable) -> bool:
    """Whether a hook is one of those that gather and release the weights of a module (see `harmless.ENGINES`)."""
    return harmless.is_of(_written_in(hook), harmless.ENGINES)


def of_users(hooks: Iterable[Callable], known: tuple[str, ...] = harmless.HOOKING) -> list[Callable]:
    """Hooks other than those of packages that are known not to look at activations."""
    return [hook for hook in hooks if not harmless.is_of(_written_in(hook), known)]


def has_additions(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward of its own."""
    return "forward" in vars(module) or any(vars(module)[name] for name in HOOKS)


def hook_identities(hooks: Iterable[Callable]) -> Iterator[tuple]:
    """Identifies hooks, except those that fastdpo sets, and hooks of engines: TRL removes DeepSpeed's while a model
    generates, and adds new ones.
    """
    for hook in hooks:
        if not is_named_hook(hook) and not is_hook_of_engine(hook):
            yield identity_of(hook)


def identity_of(function: Callable) -> tuple:
    """Identifies a function by its code, its owner and the values it closes over.

    Its id would not do: hooks are often created anew.
    """
    owner = id(getattr(function, "__self__", None))
    function = inner_function(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return id(type(function)), owner
    values = (*(function.__defaults__ or ()), *closure_contents(function))
    return id(code), owner, *((type(x), x) if type(x) in PLAIN else id(x) for x in values)


def _written_in(hook: Callable) -> str:
    """The module that a hook was written in, whatever decorates it."""
    return module_of(inspect.unwrap(inner_function(hook)))
