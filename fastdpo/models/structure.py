"""The structure of a model as a hash: modules, their classes, hooks, replaced forwards and plain
attributes.

The probe's result for a model, and log-probabilities remembered from it, are valid as long as its
structure stays the same. The hash is needed for every call. It is computed again only if the modules
differ from all of its latest snapshots, and then the part that each module adds to it is cached until
the module's attributes change.

The comparison with a snapshot reads all modules in every call, in a few loops that run in C, and looks
at nothing else that could be out of date: writes to `vars(module)` and `module._modules` are seen as
well as those by `setattr`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from . import attention, harmless, head
from .harmless import closure_contents, inner_function, module_of, name_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN = (bool, int, float, str, type(None))

MAX_SNAPSHOTS = 4
"""Number of snapshots of a model that are kept: in training and in evaluation, with adapters and without."""

_variables_of = attrgetter("__dict__")  # faster than `vars`
_children_of = attrgetter("_modules")
_registries_of = attrgetter("_modules", *head.HOOKS)


class _Snapshot(NamedTuple):
    """What a hash was computed from, in a form that a few calls in C compare with the model.

    Attributes and hooks of the model itself are left out, as in the hash.

    Attributes:
        implementation: of the model's attention.
        modules: in the order of `nn.Module.modules`, the model first, and functions that are modules.
        kinds: their classes.
        attributes: those of the other modules. Children and hooks are in dictionaries, which are equal here if they
            are the same objects.
        empty: those of these dictionaries that had no entry.
        children: of the model.
        parents: the other modules that have children.
        names: of all of these children, in order, in which `nn.Sequential` calls them.
        inner: these children.
        additions: of the modules that have any. A hook may close over values that have changed.
        hash: of the structure.
        of_kinds: modules by a class or an attribute that was asked for.
    """

    implementation: str
    modules: list[nn.Module]
    kinds: list[type]
    attributes: list[dict[str, Any]]
    empty: list[dict]
    children: dict[str, nn.Module | None]
    parents: list[nn.Module]
    names: list[str]
    inner: list[nn.Module | None]
    additions: list[tuple[nn.Module, tuple[object, ...]]]
    hash: int
    of_kinds: dict[type | str, list[nn.Module]]

    def describes(self, model: PreTrainedModel, attributes: list[dict[str, Any]]) -> bool:
        """Whether a model is as it was, given the present attributes of its other modules."""
        if not _are_equal(attributes, self.attributes) or any(self.empty):
            return False
        registered = [*map(_children_of, self.parents)]
        return (
            self.children == model._modules
            and self.names == [*chain.from_iterable(registered)]
            and self.inner == [*chain.from_iterable(map(dict.values, registered))]
            and self.modules[0] is model
            and self.implementation == attention.implementation(model)
            and self.kinds == [*map(type, self.modules)]
            and all(additions == tuple(additions_to(module)) for module, additions in self.additions)
        )


class Structure:
    """Computes the structure hash of one model. Keeps its modules
    alive, so that no id is used twice.
    """

    def __init__(self) -> None:
        # By id of a module: the module, its class, its attributes, and the hash of plain ones.
        self._cache: dict[int, tuple[nn.Module, type, dict[str, Any], int]] = {}
        self._snapshots: list[_Snapshot] = []  # of the same modules, the most recently used first

    def hash(self, model: PreTrainedModel) -> int:
        """The hash of the model's structure, valid in this process.

        Leaves out hooks on the model itself, because they run around its wrapped forward.
        """
        attributes = [*map(_variables_of, self._snapshots[0].modules[1:])] if self._snapshots else []
        latest = next((snapshot for snapshot in self._snapshots if snapshot.describes(model, attributes)), None)
        if latest is None:
            latest = self._snapshot(model)
            self._snapshots = [x for x in self._snapshots if x.modules == latest.modules]  # keeps no replaced module
        self._snapshots = [latest, *(x for x in self._snapshots if x is not latest)][:MAX_SNAPSHOTS]
        return latest.hash

    def modules_of(self, model: nn.Module, kind: type | str) -> list[nn.Module]:
        """The modules of a class, or with an attribute of a name, that the model had when its hash was last asked
        for, or those that it has now if its hash is not known yet.
        """
        is_of: Any = hasattr if isinstance(kind, str) else isinstance
        if not self._snapshots:
            return [module for module in model.modules() if is_of(module, kind)]
        latest = self._snapshots[0]
        if kind not in latest.of_kinds:
            latest.of_kinds[kind] = [module for module in latest.modules if is_of(module, kind)]
        return latest.of_kinds[kind]

    def _snapshot(self, model: PreTrainedModel) -> _Snapshot:
        implementation, modules = attention.implementation(model), _modules_of(model)
        hashed, others = [self._hash_of(module, is_model=module is model) for module in modules], modules[1:]
        if len(self._cache) > 2 * len(modules):
            self._cache = {id(module): self._cache[id(module)] for module in modules}
        parents = [module for module in others if module._modules]
        registered = [*map(_children_of, parents)]
        return _Snapshot(
            implementation,
            modules,
            kinds=[*map(type, modules)],
            attributes=[self._cache[id(module)][2] for module in others],
            empty=[registry for module in others for registry in _registries_of(module) if not registry],
            children=dict(model._modules),
            parents=parents,
            names=[*chain.from_iterable(registered)],
            inner=[*chain.from_iterable(map(dict.values, registered))],
            additions=[(module, tuple(additions_to(module))) for module in others if _has_additions(module)],
            hash=hash((implementation, *hashed)),
            of_kinds={},
        )

    def _hash_of(self, module: nn.Module, is_model: bool) -> int:
        attributes, kind = vars(module), type(module)
        cached = self._cache.get(id(module))
        if cached is None or cached[:2] != (module, kind) or not _are_equal(attributes, cached[2]):
            cached = (module, kind, dict(attributes), hash(kind if is_model else plain_attributes(module)))
            self._cache[id(module)] = cached
        return hash((id(module), cached[3], *(additions_to(module) if _has_additions(module) and not is_model else ())))


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, and the functions of modeling files that they call, which are modules where the package
    `kernels` is installed. A kernel may replace the forward of each.
    """
    modules = [*model.modules()]
    functions = (function for module in modules for function in vars(module).get("_kernel_funcs", {}).values())
    return [*modules, *dict.fromkeys(functions)]


def _has_additions(module: nn.Module) -> bool:
    return "forward" in vars(module) or any(vars(module)[name] for name in head.HOOKS)


def additions_to(module: nn.Module) -> Iterator[object]:
    """Identifies the hooks on a module and a replaced forward, except those that fastdpo sets, and hooks of
    engines: TRL removes DeepSpeed's while a model generates, and adds new ones.
    """
    for hook in head.hooks_of(module):
        is_named = name_of(hook).split(".")[-1] in harmless.HOOKS or module_of(hook) in harmless.HOOK_MODULES
        if not is_named and not head.is_hook_of_engine(hook):
            yield _identity(hook)
    forward = vars(module).get("forward")
    if head.is_installed(forward):
        forward = vars(module).get(head.OWN_FORWARD)
    if forward is not None:
        yield _identity(forward)


def plain_attributes(module: nn.Module) -> tuple[type, tuple[tuple[str, Any], ...]]:
    """The class of a module, and its plain attributes that results may depend on."""
    kept = (
        (name, x)
        for name, x in vars(module).items()
        if type(x) in PLAIN and name not in harmless.ATTRIBUTES and not name.startswith(harmless.COUNTERS)
    )
    return type(module), tuple(kept)


def _are_equal(attributes: object, cached: object) -> bool:
    try:
        return attributes == cached  # values that are the same object are equal, whatever they are
    except (RuntimeError, ValueError):  # raised by tensors and arrays
        return False


def _identity(function: Callable) -> tuple:
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
