"""What the modules of a model keep between its calls, and whether a run has changed it.

Some layers count their calls, calibrate in the first one, or keep what they have computed. The rows of a probe must
leave no trace in them, and packed calls would leave other traces than those of the trainer's own path.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..identity.contents import Container, attributes_of, containers_in, copy_of, is_own, is_rotary, members_of
from ..identity.functions import PLAIN, inner_function, module_of
from ..identity.harmless import CODE, is_of
from .comparable import is_quantized

_KNOWN = (*CODE, "builtins")
"""Packages whose code refers to no variables of users."""


@contextmanager
def restored(model: nn.Module) -> Iterator[list[str]]:
    """After the block, the buffers and attributes of all modules, the variables of user code in them, and what lists,
    dictionaries, sets and objects among these hold, are as they were. Yields a list that then names those that had
    changed.

    Rotary embeddings may keep what follows the width of their last batch. This is restored as well, and not named.
    """
    variables, outside = _variables(model), nn.Module()
    vars(outside).update({name: getattr(*x) for name, x in variables.items()})
    snapshots = [_Snapshot(name, module) for name, module in (("", outside), *model.named_modules())]
    changed: list[str] = []
    try:
        yield changed
    finally:
        vars(outside).update({name: getattr(*x) for name, x in variables.items()})
        for snapshot in snapshots:
            changed += snapshot.restore()
        for name, x in variables.items():
            setattr(*x, vars(outside)[name])


def _variables(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """The variables outside of a model that user code in it refers to, by name, as attributes of objects: those of its
    classes, and what their functions close over, read of modules, or have as defaults.
    """
    kinds = {kind for x in model.modules() for kind in type(x).__mro__ if not is_of(kind.__module__, _KNOWN)}
    found: dict[str, tuple[Any, str]] = {
        f"{kind.__qualname__}.{name}": (kind, name)
        for kind in kinds
        for name, x in vars(kind).items()
        if not name.startswith("__") and not hasattr(x, "__get__")
    }
    seen, pending = set(), [x for owner in (*kinds, *model.modules()) for x in vars(owner).values() if callable(x)]
    while pending:
        function: Any = inspect.unwrap(inner_function(pending.pop()))
        if function in seen or not isinstance(function, FunctionType) or is_of(module_of(function), _KNOWN):
            continue
        seen.add(function)
        code, scope = function.__code__, sys.modules.get(module_of(function))
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        own = {name: (cell, "cell_contents") for name, cell in cells if cell != CellType()}  # one that is bound
        own |= {name: (scope, name) for name in code.co_names if name in getattr(scope, "__dict__", ())}
        own |= {"__defaults__": (function, "__defaults__")}
        found |= {f"{function.__qualname__}.{name}": x for name, x in own.items()}
        pending += [x for x in (getattr(*each) for each in own.values()) if callable(x)]
    return found


class _Snapshot:
    """What one module keeps."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module, self._is_named = name, module, not is_rotary(module)
        self._attributes, self._buffers = self._own(), dict(module._buffers)
        self._inside: list[tuple[str, Container, Container]] = []
        self._tensors: list[tuple[str, Tensor, Tensor]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        for attribute, value in (*self._attributes.items(), *self._buffers.items()):
            containers = [*containers_in([value])]
            self._inside += [(attribute, x, copy_of(x)) for x in containers]
            for x in (value, *(member for container in containers for member in members_of(container))):
                if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.device.type != "meta":
                    self._tensors.append((attribute, x, x.detach().clone()))
                elif isinstance(x, torch.Generator):
                    self._generators.append((x, x.get_state()))

    def restore(self) -> list[str]:
        """Makes the module what it was, and returns the names of what had changed."""
        changed = []
        for attribute, x, copy in self._tensors:
            if not _equal(x, copy):
                changed.append(attribute)
                x.detach().copy_(copy)
        for attribute, container, copy in self._inside:
            if not _holds(container, copy):
                changed.append(attribute)
                _refill(container, copy)
        for registry, present, kept in (
            (vars(self._module), self._own(), self._attributes),
            (self._module._buffers, self._module._buffers, self._buffers),
        ):
            for attribute in present.keys() | kept.keys():
                if not _is_same(present.get(attribute, self), kept.get(attribute, self)):
                    changed.append(attribute)
                    registry.pop(attribute, None)
                    if attribute in kept:
                        registry[attribute] = kept[attribute]
        for generator, state in self._generators:
            generator.set_state(state)
        return [f"{self._name}.{x}".lstrip(".") for x in dict.fromkeys(changed)] if self._is_named else []

    def _own(self) -> dict[str, Any]:
        """The attributes that a run may change: those of the class and of user code, and not those that count the runs
        of quantized layers, which `undisturbed` restores.
        """
        if not self._is_named:
            return {name: x for name, x in vars(self._module).items() if is_own(name)}
        is_kept = any(map(is_quantized, self._module.parameters(recurse=False)))
        return {} if is_kept else attributes_of(self._module)


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal. NaN equals NaN."""
    return torch.equal(x, y) or (x.is_floating_point() and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True))


def _is_same(x: Any, y: Any) -> bool:
    if type(x) is type(y) is tuple:
        return len(x) == len(y) and all(map(_is_same, x, y))
    return x is y or (type(x) in PLAIN and type(x) is type(y) and x == y)


def _holds(container: Container, copy: Container) -> bool:
    """Whether a container has the members that it had."""
    if len(container) != len(copy):
        return False
    if isinstance(copy, set):
        return container == copy
    if isinstance(copy, dict) and [*container] != [*copy]:
        return False
    return all(map(_is_same, members_of(container), members_of(copy)))


def _refill(container: Any, copy: Container) -> None:
    container.clear()
    if isinstance(copy, Mapping | set):
        container.update(copy)
    else:
        container.extend(copy)
