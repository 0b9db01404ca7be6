"""Everything about a model's modules that its outputs depend on: classes, tensors and attributes.

A class is identified by its name, the bytes of its file and the version of its package. Hooks, forwards that
replace that of a class, and objects that are not known raise NotImplementedError: values cannot be cached, since a
model with other outputs may look the same. Those of trainers and engines (accelerate, PEFT, FSDP2, fastdpo) do not
change a model's outputs and are left out.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as hooks_of_all_modules

from ..models.adapters import WRAPPED, adapter_modules, adapter_states, inactive_names
from ..models.identity.contents import attributes_of
from ..models.identity.functions import closure_contents, inner_function, module_of, name_of, wrapped_in
from ..models.identity.harmless import LIBRARIES, MODULES, OTHER_ATTRIBUTES, is_of
from ..models.parts import is_transformers_model
from ..models.state import ATTRIBUTE as FUSED_FORWARD
from .digests import canonical_json, config_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KERNELS = "_kernel_funcs"
"""The attribute that holds functions of a modeling file as modules, where the package `kernels` is installed."""

IRRELEVANT = OTHER_ATTRIBUTES | {FUSED_FORWARD, KERNELS}

_DECORATORS = (*MODULES, "transformers.modeling_rope_utils")
"""The modules of what decorates forwards in modeling files."""

_COLLECTIONS = (Mapping, list, tuple, set, frozenset)
_FUNCTIONS = (FunctionType, MethodType, functools.partial)


class ModuleStates:
    """Everything that the outputs of a model depend on, as it would run now.

    It is the same with and without inactive adapters, FSDP2, DeepSpeed, `torch.compile` and the
    hooks of trainers.

    Attributes:
        tensors: parameters, all buffers and tensors held as attributes, by name.
        entries: everything else, as values that JSON can represent.

    Raises:
        NotImplementedError: a module runs a function, or holds an object, that is not known.
    """

    def __init__(self, model: PreTrainedModel):
        from transformers import PreTrainedModel

        self.tensors: dict[str, Tensor] = {}
        self.entries: list[object] = []
        self._classes: dict[type, str] = {}
        self._of_class = {name for name in dir(PreTrainedModel) if not callable(getattr(PreTrainedModel, name, None))}
        for hooks in (hooks_of_all_modules._global_forward_hooks, hooks_of_all_modules._global_forward_pre_hooks):
            _require_known("every module", hooks.values())
        is_inactive = inactive_names(model)
        adapters = {id(module) for _, module in adapter_modules(model)}
        names, wrappers = {"": ""}, set()
        for path, module in model.named_modules(remove_duplicate=False):  # parents first
            if path:
                parent, _, own = path.rpartition(".")
                inside = parent in wrappers and own in WRAPPED
                names[path] = names[parent] if inside else f"{names[parent]}.{own}".removeprefix(".")
            name = names[path]
            if is_inactive(name):
                continue
            for own, x in (*module._parameters.items(), *module._buffers.items()):
                tensor = f"{name}.{own}".removeprefix(".")
                if x is not None and not is_inactive(tensor):
                    self.tensors[tensor] = x
            if id(module) in adapters or (WRAPPED & module._modules.keys() and is_of(type(module).__module__, MODULES)):
                wrappers.add(path)
            else:
                self.entries.append([name, *self._module(name, module)])
            for each in (module, *vars(module).get(KERNELS, {}).values()):
                require_no_additions(name or "the model", each)
        self.entries += [[name, self._value(name, state)] for name, state in adapter_states(model)]

    def _module(self, name: str, module: nn.Module) -> list[object]:
        declared = self._of_class if is_transformers_model(module) else set()
        dropout = {"p", "inplace"} if isinstance(module, nn.modules.dropout._DropoutNd) else set()
        attributes = {
            attribute: self._value(f"{name}.{attribute}", x)
            for attribute, x in attributes_of(module).items()
            if attribute not in declared | IRRELEVANT | dropout and not _is_harmless(x)
        }
        return [
            self._class(name or "the model", _own_class(module)),
            [*module._modules],
            _precision(module),
            attributes,
        ]

    def _class(self, where: str, kind: type) -> str:
        """Hash of the names and files of a class and those that it inherits from, and of the name of its forward."""
        if kind not in self._classes:
            found: list[object] = []
            for base in kind.__mro__:
                if base.__module__ not in sys.builtin_module_names:
                    file = _file(base)
                    if file is None:
                        raise NotImplementedError(f"{where} is a {kind.__qualname__}, which no file defines")
                    code = hashlib.sha256(Path(file).read_bytes()).hexdigest()
                    found.append([base.__module__, base.__qualname__, version_of(base.__module__), code])
            owner: Any = next((base for base in kind.__mro__ if "forward" in vars(base)), None)
            if owner is not None:
                _require_known(where, [owner.forward], file=_file(owner), modules=_DECORATORS)
                found.append(name_of([*wrapped_in(owner.forward)][-1]))
            self._classes[kind] = hashlib.sha256(canonical_json(found).encode()).hexdigest()
        return self._classes[kind]

    def _value(self, where: str, x: Any) -> object:
        """A value of a known class as JSON."""
        from transformers import PretrainedConfig

        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, (torch.dtype, torch.device, Enum)):
            return repr(x)
        if isinstance(x, Tensor):
            self.tensors[where] = x
            return "tensor"
        if isinstance(x, Mapping):
            return {repr(name): self._value(f"{where}.{name}", y) for name, y in x.items()}
        if isinstance(x, (list, tuple)):
            return [self._value(f"{where}.{i}", y) for i, y in enumerate(x)]
        if isinstance(x, (set, frozenset)):
            return sorted(str(self._value(where, y)) for y in x)
        if isinstance(x, PretrainedConfig):
            return config_digest(x)
        if isinstance(x, type):
            return self._class(where, x)
        if isinstance(x, functools.partial):
            return [self._value(where, y) for y in (x.func, x.args, x.keywords)]
        if _is_harmless(x):
            return name_of(type(x))
        if isinstance(x, (FunctionType, BuiltinFunctionType)):
            module, line = module_of(x), x.__code__.co_firstlineno if isinstance(x, FunctionType) else None
            if not is_of(module, LIBRARIES) or getattr(x, "__closure__", None):
                raise NotImplementedError(f"{where} runs {_described(x)}")
            return [module, x.__qualname__, line, version_of(module)]
        raise NotImplementedError(f"{where} holds a {type(x).__qualname__}")


def require_no_additions(name: str, module: nn.Module) -> None:
    """Raises NotImplementedError for a hook on a module, or a forward in the place of that of its class, that is not
    one of a trainer or of an engine.
    """
    _require_known(name, [*module._forward_pre_hooks.values(), *module._forward_hooks.values()])
    attributes = vars(module)
    replaced = [attributes[x] for x in ("forward", "_old_forward", "_original_forward") if x in attributes]
    fused: Any = attributes.get(FUSED_FORWARD)
    while fused is not None:
        replaced.append(fused.prior_forward)
        fused = fused.inner
    _require_known(name, replaced, known=_inside(type(module).forward) if replaced else ())


def _require_known(
    where: str,
    functions: Iterable[Any],
    known: Iterable[Any] = (),
    file: str | None = None,
    modules: tuple[str, ...] = MODULES,
) -> None:
    """Raises NotImplementedError for the first function, or the first one inside, that is neither among the known ones,
    nor written in this file without closing over values, nor of one of these modules.
    """
    ids = {id(x) for x in known}
    for x in (x for function in functions for x in _inside(function)):
        code = getattr(x, "__code__", None)
        is_here = code is not None and code.co_filename == file and {*code.co_freevars} <= {"__class__"}
        if not is_here and id(x) not in ids and not is_of(module_of(x), modules):
            raise NotImplementedError(f"{where} runs {_described(x)}")


def _is_harmless(x: Any) -> bool:
    """Whether an object is one of a trainer or of an engine, or a collection of such objects."""
    if isinstance(x, _COLLECTIONS):
        return bool(x) and all(map(_is_harmless, x.values() if isinstance(x, Mapping) else x))
    return all(is_of(module_of(each), MODULES) for each in _inside(x))


def _inside(function: Any) -> Iterator[Any]:
    """A function and those that it wraps, is bound to or closes over."""
    pending, seen = [function], {}
    while pending:
        x = pending.pop()
        if id(x) in seen:  # it may be inside itself
            continue
        seen[id(x)] = x
        if isinstance(x, functools.partial):
            bound = [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, MethodType):
            bound = [x.__func__]
        elif isinstance(x, FunctionType):
            bound = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *closure_contents(x)]
        else:
            bound = []
        wrapped = getattr(x, "__wrapped__", None)
        pending += [] if wrapped is None else [wrapped]
        pending += [each for each in bound if isinstance(each, _FUNCTIONS)]
        yield inner_function(x)


def _described(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})" if code else f"a {name_of(function)}"


def _own_class(module: nn.Module) -> type:
    """A module's class, or its former class if FSDP2 has replaced it."""
    kind = type(module)
    return kind.__mro__[module._orig_cls_mro_index] if isinstance(module, FSDPModule) else kind


def _precision(module: nn.Module) -> object:
    """The dtypes that FSDP2 casts to, or None."""
    if not isinstance(module, FSDPModule):
        return None
    policy = module._get_fsdp_state()._mp_policy
    dtypes = (policy.param_dtype, policy.output_dtype)
    return None if dtypes == (None, None) else [str(dtypes), policy.cast_forward_inputs]


def _file(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


@functools.cache
def version_of(module: str) -> str | None:
    """The version of the package of a module. None for the standard library, and for a file of one's own."""
    package = module.partition(".")[0]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name
        version = getattr(sys.modules.get(package), "__version__", None)
    return version and str(version).partition("+")[0]
