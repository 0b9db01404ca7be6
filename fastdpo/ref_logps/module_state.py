"""Everything about a model's modules that its outputs depend on: classes, tensors, attributes,
hooks and forwards.

A function cannot be hashed, because it may read any variable. A function from an installed package
is identified by its name, like the classes of that package. Functions of trainers and engines
(accelerate, PEFT, FSDP2, fastdpo) do not change a model's outputs and are left out. A model with
any other function raises `NotCacheable`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as hooks_of_all_modules

from ..models.adapters import WRAPPED, InactiveAdapters, adapter_modules, adapter_states
from ..models.forward import ATTRIBUTE as FUSED_FORWARD
from ..models.functions import closure_contents
from ..models.harmless import ATTRIBUTES, COUNTERS, LIBRARIES, MODULES, OTHER_ATTRIBUTES, is_of
from .digests import config_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IRRELEVANT = ATTRIBUTES | OTHER_ATTRIBUTES | {FUSED_FORWARD}

FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)

_NEUTRAL = object()
"""Marks values that a model's outputs do not depend on."""


class NotCacheable(NotImplementedError):
    """A model cannot be distinguished from one with other outputs, so its values cannot be cached."""


class ModuleStates:
    """Everything that the outputs of a model depend on, as it would run now.

    It is the same with and without inactive adapters, FSDP2, DeepSpeed, `torch.compile` and the
    hooks of trainers.

    Attributes:
        tensors: parameters, all buffers and tensors held as attributes, by name.
        entries: everything else, as values that JSON can represent.

    Raises:
        NotCacheable: a module runs a function, or holds an object, that does not come from an
            installed package.
    """

    def __init__(self, model: PreTrainedModel):
        from transformers import PreTrainedModel

        self.tensors: dict[str, Tensor] = {}
        self.entries: list[object] = []
        self._classes: dict[type, object] = {}
        self._own_files: set[str] = set()  # files of the class that is being recorded; their bytes are hashed
        self._known_functions: dict[int, tuple[object, set[str]]] = {}
        declared = {name for name in dir(PreTrainedModel) if not callable(getattr(PreTrainedModel, name, None))}
        self._declared = {nn.Module: set(vars(nn.Module())), PreTrainedModel: declared}
        self._seen = set(map(id, model.modules()))  # modules held as plain attributes are added
        self._config = model.config
        for hook in (
            *hooks_of_all_modules._global_forward_hooks.values(),
            *hooks_of_all_modules._global_forward_pre_hooks.values(),
        ):
            self._hook("every module", hook)
        self._visit(model, "")
        for name, state in adapter_states(model):
            self._add(name, "adapters", self._value(name, state))

    def add_functions(self, name: str, module: nn.Module) -> None:
        """Adds a module's hooks, and the forwards that replace that of its class."""
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._hook(name, hook)
        attributes = vars(module)
        fused: Any = attributes.get(FUSED_FORWARD)
        while fused is not None:
            self._forward(name, module, fused.prior_forward)
            fused = fused.inner
        for attribute in ("forward", "_old_forward", "_original_forward"):
            if attribute in attributes:
                self._forward(name, module, attributes[attribute])

    def _visit(self, model: nn.Module, prefix: str) -> None:
        inactive = InactiveAdapters(model)
        adapters = {id(module) for _, module in adapter_modules(model)}
        names, wrappers = {"": ""}, set()
        for path, module in model.named_modules(remove_duplicate=False):  # parents first
            if path:
                parent, _, own = path.rpartition(".")
                inside = parent in wrappers and own in WRAPPED
                names[path] = names[parent] if inside else f"{names[parent]}.{own}".removeprefix(".")
            if names[path] in inactive:
                continue
            name = prefix + names[path]
            for own, x in (*module._parameters.items(), *module._buffers.items()):
                tensor = f"{names[path]}.{own}".removeprefix(".")
                if x is not None and tensor not in inactive:
                    self.tensors[prefix + tensor] = x
            if id(module) in adapters or (
                WRAPPED & module._modules.keys() and _is_neutral(_installed_module_of(type(module)))
            ):
                wrappers.add(path)
            else:
                self._module(name, module)
            self.add_functions(name, module)

    def _module(self, name: str, module: nn.Module) -> None:
        self._add(name, "class", self._class(name, _own_class(module)))
        if isinstance(module, nn.Sequential):
            self._add(name, "order", list(module._modules))
        self._add(name, "precision", _precision(module))
        attributes = vars(module)
        dropout = {"p", "inplace"} if isinstance(module, nn.modules.dropout._DropoutNd) else set()
        declared = set().union(*(names for kind, names in self._declared.items() if isinstance(module, kind)))
        for attribute in sorted(attributes.keys() - declared - IRRELEVANT - dropout):
            if attribute.startswith(COUNTERS):
                continue
            self._add(name, attribute, self._value(f"{name}.{attribute}", attributes[attribute]))

    def _add(self, name: str, what: str, value: object) -> None:
        if value is not _NEUTRAL:
            self.entries.append([name, what, value])

    def _hook(self, name: str, hook: Callable) -> None:
        self._add(name, "a hook", sorted(self._functions(name, hook)) or _NEUTRAL)

    def _forward(self, name: str, module: nn.Module, forward: Callable) -> None:
        others = self._functions(name, forward) - self._functions(name, type(module).forward)
        self._add(name, "forward", sorted(others) or _NEUTRAL)

    def _class(self, where: str, kind: type) -> object:
        """Identifies a class and its forward, and one that is not installed
        by the bytes of its file as well.
        """
        if kind in self._classes:
            return self._classes[kind]
        names: list[object] = []
        for base in kind.__mro__:
            names.append(f"{base.__module__}.{base.__qualname__}")
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if base.__module__ in sys.builtin_module_names or _installed(file):
                break
            if file is None:
                raise NotCacheable(f"{where or 'the model'} is a {kind.__qualname__}, which no file defines")
            self._own_files.add(file)
            names.append(hashlib.sha256(Path(file).read_bytes()).hexdigest())
        forward = getattr(kind, "forward", None)
        names.append(None if forward is None else sorted(self._functions(where, forward)))
        self._own_files.clear()
        self._classes[kind] = names
        return names

    def _functions(self, where: str, function: Any) -> set[str]:
        """Identifies a function, those that it wraps and what they are bound
        to. Leaves out neutral functions.
        """
        if id(function) not in self._known_functions:
            self._known_functions[id(function)] = (function, set())  # it may refer to itself
            self._known_functions[id(function)] = (function, self._names(where, function))
        return self._known_functions[id(function)][1]

    def _names(self, where: str, function: Any) -> set[str]:
        around = getattr(function, "__wrapped__", None)
        wrapped = set() if around is None else self._functions(where, around)
        if isinstance(function, (functools.partial, MethodType)):
            partial = isinstance(function, functools.partial)
            inner = self._functions(where, function.func if partial else function.__func__)
            bound = self._value(where, [function.args, function.keywords] if partial else function.__self__)
            return wrapped | (inner if bound is _NEUTRAL or not inner else {json.dumps([sorted(inner), bound])})
        if isinstance(function, BuiltinFunctionType):
            return {f"{function.__module__}.{function.__qualname__}"}
        if not isinstance(function, FunctionType):  # an object that can be called
            value = self._value(where, function)
            return wrapped if value is _NEUTRAL else {*wrapped, json.dumps(value)}
        installed = _installed(function.__code__.co_filename)
        if installed is None:
            own = function.__code__.co_filename in self._own_files
            if not own or {*function.__code__.co_freevars} - {"__class__"}:
                raise NotCacheable(f"{where or 'the model'} runs {_described(function.__code__)}")
            return {*wrapped, function.__code__.co_qualname}
        bound = closure_contents(function)
        if _is_neutral(installed):
            python = (FunctionType, MethodType, functools.partial)
            return wrapped.union(*(self._functions(where, x) for x in bound if isinstance(x, python)))
        given = self._value(where, [function.__defaults__, function.__kwdefaults__, bound])
        return {*wrapped, json.dumps([installed, function.__code__.co_qualname, given], sort_keys=True)}

    def _value(self, where: str, x: Any) -> object:
        from transformers import PretrainedConfig

        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, (complex, bytes, torch.dtype, range, slice, np.generic, Enum)):
            return repr(x)
        if isinstance(x, np.ndarray):
            return [str(x.dtype), list(x.shape), hashlib.sha256(x.tobytes()).hexdigest()]
        if isinstance(x, Tensor):
            self.tensors[where] = x
            return "tensor"
        if isinstance(x, Mapping):
            named = {name if isinstance(name, str) else repr(name): item for name, item in x.items()}
            return _pruned({name: self._value(f"{where}.{name}", item) for name, item in named.items()})
        if isinstance(x, (list, tuple)):
            return _pruned({i: self._value(f"{where}.{i}", item) for i, item in enumerate(x)})
        if isinstance(x, (set, frozenset)):
            return sorted(str(self._value(where, item)) for item in x)
        if isinstance(x, PretrainedConfig):
            return _NEUTRAL if x is self._config else config_digest(x)
        if isinstance(x, nn.Module):
            if id(x) not in self._seen:
                self._seen.update(map(id, x.modules()))
                self._visit(x, f"{where}.")
            return _NEUTRAL
        if isinstance(x, type):
            return self._class(where, x)
        if isinstance(x, FUNCTIONS):
            return sorted(self._functions(where, x)) or _NEUTRAL
        return self._object(where, x)

    def _object(self, where: str, x: object) -> object:
        if isinstance(x, torch.device):
            return _NEUTRAL
        kind = type(x)
        installed = _installed_module_of(kind)
        if _is_neutral(installed):
            return _NEUTRAL
        if isinstance(x, SimpleNamespace) or (installed and dataclasses.is_dataclass(x)):
            return [kind.__qualname__, self._value(where, vars(x))]
        if installed is None and kind.__module__ not in sys.builtin_module_names:
            raise NotCacheable(f"{where} holds a {kind.__qualname__}")
        return f"{kind.__module__}.{kind.__qualname__}"


def _own_class(module: nn.Module) -> type:
    """A module's class, or its former class if FSDP2 has replaced it."""
    kind = type(module)
    return kind.__mro__[module._orig_cls_mro_index] if isinstance(module, FSDPModule) else kind


def _precision(module: nn.Module) -> object:
    """The dtypes that FSDP2 casts to, if it does."""
    if not isinstance(module, FSDPModule):
        return _NEUTRAL
    policy = module._get_fsdp_state()._mp_policy
    dtypes = (policy.param_dtype, policy.output_dtype)
    return _NEUTRAL if dtypes == (None, None) else [str(dtypes), policy.cast_forward_inputs]


def _pruned(items: dict) -> object:
    """The items that are not neutral, or `_NEUTRAL` if all are."""
    kept = {str(name): x for name, x in items.items() if x is not _NEUTRAL}
    return kept if kept or not items else _NEUTRAL


def _described(code: CodeType) -> str:
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _installed_module_of(kind: type) -> str | None:
    """The module that defines a class, if it is installed."""
    return _installed(getattr(sys.modules.get(kind.__module__), "__file__", None))


def _is_neutral(module: str | None) -> bool:
    return is_of(module, MODULES)


@functools.cache
def _installed(file: str | None) -> str | None:
    """The dotted module name of a file of an installed package, or None
    for any other file, such as a script.
    """
    if file is None:
        return None
    libraries = [(name, root) for name in LIBRARIES for root in getattr(sys.modules.get(name), "__path__", ())]
    scheme = sysconfig.get_paths()
    sites = [scheme["purelib"], scheme["platlib"], *site.getsitepackages(), site.getusersitepackages()]
    for name, root in (*libraries, *(("", root) for root in (*sites, scheme["stdlib"], scheme["platstdlib"]))):
        if Path(file).is_relative_to(root):
            parts = Path(file).relative_to(root).with_suffix("").parts
            return ".".join(part for part in (name, *parts) if part not in ("", "__init__"))
    return None
