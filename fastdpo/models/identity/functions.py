"""Reads from functions what they are and where they come from: those that modules run, and those that others have
attached to modules, which are hooks, and forwards that replace those of classes.

A hook of user code on a module inside of the model, or a forward in the place of its own, sees the arguments and the
outputs of that module, which are packed tokens in a fused call. Such a model runs as the trainer's own path has it for
as long as the hook is there. What is attached to the model itself sees its padded calls, and may stay unless it expects
logits that a fused call does not compute. Hooks on parameters see the gradients of a step, and may stay.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as hooks_of_all_modules

from . import harmless

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold its hooks. For those of every module, torch has dictionaries of like names."""

PLAIN = (bool, int, float, str, type(None))

_hooks_of_all: list[dict[int, Callable]] = [getattr(hooks_of_all_modules, f"_global{name}") for name in HOOKS]

_MODELING = ("transformers.models.", "transformers_modules.")
"""Packages of modeling files."""

_MASKING = "transformers.masking_utils"

_forward_of = attrgetter("forward")


class Code:
    """The functions that modules of some classes run, as pointers that are compared in a few loops in C.

    Args:
        kinds: the classes.

    Attributes:
        functions: the forwards of the classes, what is called by name in their modeling files and where transformers
            makes masks, and torch's `scaled_dot_product_attention`. Those that fastdpo has wrapped are as they were.
        hash: of these.
    """

    def __init__(self, kinds: Collection[type]) -> None:
        self._kinds = [*kinds]
        written_in = {kind.__module__ for each in kinds for kind in each.__mro__}
        files = sorted(name for name in written_in if name.startswith(_MODELING))
        self._globals = [vars(sys.modules[name]) for name in (*files, _MASKING) if name in sys.modules]
        self._were = *self._of_classes(), *map(dict, self._globals)
        named = [x for file in self._globals for x in file.values() if callable(x)]
        self.functions = [*self._of_classes()[0], functional.scaled_dot_product_attention, *map(_own_of, named)]
        self.hash = hash(tuple(map(id, self.functions)))

    def __reduce__(self) -> tuple:
        """A copy of a model finds them anew: globals cannot be copied."""
        return Code, (self._kinds,)

    def is_unchanged(self) -> bool:
        return (*self._of_classes(), *self._globals) == self._were

    def _of_classes(self) -> tuple[list[Callable], Callable]:
        return [*map(_forward_of, self._kinds)], functional.scaled_dot_product_attention


def inner_function(function: Any) -> Any:
    """The function inside methods of objects and partials."""
    while isinstance(function, partial) or (isinstance(function, MethodType) and _class_of(function) is None):
        function = function.func if isinstance(function, partial) else function.__func__
    return function


def _class_of(function: Any) -> type | None:
    """The class of a class method, such as `apply` of an autograd function: it says what the method does."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, type) else None


def closure_contents(function: FunctionType) -> list[Any]:
    """The values that a function closes over. None for a variable that is not bound yet."""
    return [None if cell == CellType() else cell.cell_contents for cell in function.__closure__ or ()]


def name_of(function: Callable) -> str:
    function = inner_function(function)
    owner = _class_of(function)
    if owner is not None:
        return f"{owner.__qualname__}.{function.__name__}"
    return getattr(function, "__qualname__", type(function).__qualname__)


def module_of(function: Callable) -> str:
    """The module that a function was written in, or the class of a callable object or of a class method.
    `functools.wraps` changes `__module__` of both, but neither `__globals__` nor the class.
    """
    function = inner_function(function)
    owner = _class_of(function)
    if owner is not None:
        return owner.__module__
    written = getattr(function, "__globals__", {}).get("__name__")
    is_object = not isinstance(function, type | BuiltinFunctionType)
    return written or getattr(type(function) if is_object else function, "__module__", None) or ""


def is_named_hook(hook: Callable) -> bool:
    """Whether a hook is one of those that are known by their names or modules (see `harmless.HOOKS`)."""
    return name_of(hook).split(".")[-1] in harmless.HOOKS or module_of(hook) in harmless.HOOK_MODULES


def forwards_of(module: nn.Module) -> Iterator[Callable]:
    """What has replaced the forward of a module's class, from the outermost wrapper to the innermost."""
    return wrapped_in(vars(module).get("forward"))


def _own_of(function: Any) -> Any:
    """A function, without the wrapper that fastdpo has put into a modeling file."""
    is_ours = isinstance(function, FunctionType) and module_of(function).startswith("fastdpo.")
    return vars(function).get("__wrapped__", function) if is_ours else function


def wrapped_in(function: Callable | None) -> Iterator[Callable]:
    """A function, and those that it wraps, from the outermost to the innermost."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def autocast_of(forward: Callable) -> torch.autocast | None:
    """The innermost autocast in which the wrappers of a forward run it, such as that of `Accelerator.prepare`."""
    wrappers = (x for x in map(inner_function, wrapped_in(forward)) if isinstance(x, FunctionType))
    autocasts = [x for wrapper in wrappers for x in closure_contents(wrapper) if isinstance(x, torch.autocast)]
    return autocasts[-1] if autocasts else None


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
