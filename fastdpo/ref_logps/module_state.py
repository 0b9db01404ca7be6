"""Everything about a model's modules that its outputs depend on: classes, tensors, attributes,
hooks and forwards.

A class or a function is identified by its name and the version of its package. A class that is not
installed is identified by the bytes of its file. Any other function cannot be, because it may read any
variable, and raises `NotCacheable`. So does an object of which it is not known how to compare it.
Functions and objects of trainers and engines (accelerate, PEFT, FSDP2, fastdpo) do not change a model's
outputs and are left out.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import site
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules import module as hooks_of_all_modules

from ..models.adapters import WRAPPED, adapter_modules, adapter_states, inactive_names
from ..models.functions import closure_contents, inner_function
from ..models.harmless import ATTRIBUTES, COUNTERS, LIBRARIES, MODULES, OTHER_ATTRIBUTES, is_of
from ..models.state import ATTRIBUTE as FUSED_FORWARD
from .digests import config_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IRRELEVANT = ATTRIBUTES | OTHER_ATTRIBUTES | {FUSED_FORWARD}

_TENSOR_PARALLELISM = ("transformers.distributed", "transformers.integrations.tensor_parallel")
"""The modules of transformers whose objects run a layer's part on each rank. Their attributes say how."""

PYTHON_FUNCTIONS = (FunctionType, MethodType, functools.partial)

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
        self._classes: dict[type, list[object]] = {}
        declared = {name for name in dir(PreTrainedModel) if not callable(getattr(PreTrainedModel, name, None))}
        self._declared = {nn.Module: set(vars(nn.Module())), PreTrainedModel: declared}
        self._seen = set(map(id, model.modules()))  # modules held as plain attributes are added
        self._config = model.config
        for hook in (
            *hooks_of_all_modules._global_forward_hooks.values(),
            *hooks_of_all_modules._global_forward_pre_hooks.values(),
        ):
            self._add("every module", "a hook", self._functions("every module", hook))
        self._visit(model, "")
        for name, state in adapter_states(model):
            self._add(name, "adapters", self._value(name, state))

    def add_functions(self, name: str, module: nn.Module) -> None:
        """Adds a module's hooks, and the forwards that replace that of its class."""
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self._add(name, "a hook", self._functions(name, hook))
        attributes = vars(module)
        replaced = [attributes[x] for x in ("forward", "_old_forward", "_original_forward") if x in attributes]
        fused: Any = attributes.get(FUSED_FORWARD)
        while fused is not None:
            replaced.append(fused.prior_forward)
            fused = fused.inner
        of_class = self._functions(name, type(module).forward) if replaced else []
        for forward in replaced:
            self._add(name, "forward", [x for x in self._functions(name, forward) if x not in of_class])

    def _visit(self, model: nn.Module, prefix: str) -> None:
        is_inactive = inactive_names(model)
        adapters = {id(module) for _, module in adapter_modules(model)}
        names, wrappers = {"": ""}, set()
        for path, module in model.named_modules(remove_duplicate=False):  # parents first
            if path:
                parent, _, own = path.rpartition(".")
                inside = parent in wrappers and own in WRAPPED
                names[path] = names[parent] if inside else f"{names[parent]}.{own}".removeprefix(".")
            if is_inactive(names[path]):
                continue
            name = prefix + names[path]
            for own, x in (*module._parameters.items(), *module._buffers.items()):
                tensor = f"{names[path]}.{own}".removeprefix(".")
                if x is not None and not is_inactive(tensor):
                    self.tensors[prefix + tensor] = x
            if id(module) in adapters or (WRAPPED & module._modules.keys() and is_of(_source(type(module)), MODULES)):
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
            if not attribute.startswith(COUNTERS):
                self._add(name, attribute, self._value(f"{name}.{attribute}", attributes[attribute]))

    def _add(self, name: str, what: str, value: object) -> None:
        if value is not _NEUTRAL and value != []:
            self.entries.append([name, what, value])

    def _class(self, where: str, kind: type) -> list[object]:
        """Identifies a class by its name, the version of its package, and its forward, which may have been
        replaced. One that is not installed by the bytes of its file, and so are those that it inherits from.
        """
        if kind not in self._classes:
            names, files = [], set()
            for base in kind.__mro__:
                file, source = _file(base), _source(base)
                names.append(f"{base.__module__}.{base.__qualname__}")
                if source is not None:
                    names.append(version_of(source))
                    break
                if file is None:
                    raise NotCacheable(f"{where or 'the model'} is a {kind.__qualname__}, which no file defines")
                files.add(file)
                names.append(hashlib.sha256(Path(file).read_bytes()).hexdigest())
            if hasattr(kind, "forward"):
                names.append(self._functions(where, kind.forward, files))
            self._classes[kind] = names
        return self._classes[kind]

    def _functions(self, where: str, function: Any, own_files: Collection[str] = ()) -> list[object]:
        """Identifies a function and those inside it, without neutral ones: each by its name and by what it is bound
        to.

        Args:
            where: the module that runs it.
            function: a function, or another object that can be called.
            own_files: files that the key depends on, which identify the functions in them.
        """
        found: list[object] = []
        for x, bound in _functions_inside(function):
            if isinstance(x, FunctionType):
                file = x.__code__.co_filename
                source = _installed(file)
                if source is None and (file not in own_files or {*x.__code__.co_freevars} - {"__class__"}):
                    raise NotCacheable(f"{where or 'the model'} runs {_described(x.__code__)}")
                bound = [] if source is None else bound
            elif isinstance(x, BuiltinFunctionType):
                source = x.__module__
            else:  # an object that can be called
                source, bound = _source(type(x)), [x]
            if not is_of(source, MODULES):
                name = [source, getattr(x, "__qualname__", type(x).__qualname__), version_of(source)]
                value = self._value(where, bound)
                found += [name] if value is _NEUTRAL else [name, [*name, value]]
        return found

    def _value(self, where: str, x: Any) -> object:
        """A value of a known class as JSON. Others raise `NotCacheable`."""
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, (torch.dtype, Enum)):
            return repr(x)
        if isinstance(x, Tensor):
            self.tensors[where] = x
            return "tensor"
        if isinstance(x, (Mapping, list, tuple, set, frozenset)):
            return self._items(where, x)
        if isinstance(x, (*PYTHON_FUNCTIONS, BuiltinFunctionType)):
            return self._functions(where, x) or _NEUTRAL
        if isinstance(x, type):  # the forward of an installed one may refer to itself
            return f"{x.__module__}.{x.__qualname__}" if _source(x) else self._class(where, x)
        return self._object(where, x)

    def _items(self, where: str, x: Any) -> object:
        if isinstance(x, (set, frozenset)):
            return sorted(str(self._value(where, item)) for item in x)
        named = x.items() if isinstance(x, Mapping) else enumerate(x)
        values = {name: self._value(f"{where}.{name}", item) for name, item in named}
        kept = {name if isinstance(name, str) else repr(name): y for name, y in values.items() if y is not _NEUTRAL}
        return kept if kept or not x else _NEUTRAL

    def _object(self, where: str, x: Any) -> object:
        from transformers import PretrainedConfig

        source = _source(type(x))
        if isinstance(x, PretrainedConfig) and x is not self._config:
            return config_digest(x)
        if isinstance(x, nn.Module) and id(x) not in self._seen:
            self._seen.update(map(id, x.modules()))
            self._visit(x, f"{where}.")
        if isinstance(x, (PretrainedConfig, nn.Module, torch.device)) or is_of(source, MODULES):
            return _NEUTRAL
        if isinstance(x, Placement):
            return repr(x)
        if is_of(source, _TENSOR_PARALLELISM):
            return [self._class(where, type(x)), self._value(where, vars(x))]
        raise NotCacheable(f"{where} holds a {type(x).__qualname__}")


def _functions_inside(function: Any) -> Iterator[tuple[Any, list[Any]]]:
    """A function and those that it wraps, is bound to or closes over, each with the other values that it is bound to.
    A bound method and a partial function count as the function inside them.
    """
    pending, seen = [function], {}
    while pending:
        x = pending.pop()
        if id(x) in seen:  # it may be inside itself
            continue
        seen[id(x)] = x
        if isinstance(x, functools.partial):
            bound = [x.func, *x.args, *x.keywords.items()]
        elif isinstance(x, MethodType):
            bound = [x.__func__, x.__self__]
        elif isinstance(x, FunctionType):
            bound = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).items(), *closure_contents(x)]
        else:
            bound = []
        wrapped = getattr(x, "__wrapped__", None)
        pending += [] if wrapped is None else [wrapped]
        pending += [each for each in bound if isinstance(each, PYTHON_FUNCTIONS)]
        yield inner_function(x), [each for each in bound if not isinstance(each, PYTHON_FUNCTIONS)]


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


def _described(code: CodeType) -> str:
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _file(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _source(kind: type) -> str | None:
    """The module that defines a class, if it is built in or installed."""
    return kind.__module__ if kind.__module__ in sys.builtin_module_names else _installed(_file(kind))


@functools.cache
def version_of(module: str | None) -> str | None:
    """The version of the package of an installed module. None for the standard library, and for a file of one's own."""
    package = str(module).partition(".")[0]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name
        version = getattr(sys.modules.get(package), "__version__", None)
    return version and str(version).partition("+")[0]


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
