"""Identities of a model: its modules, their classes, tensors, hooks, replaced forwards and attributes, and its
configuration.

What is known of a model holds as long as its identity stays the same. The probe's result for a model holds for all of
its identities with the same hash, which leaves out what it does not depend on, such as modes and the values of tensors.

Each call compares the model with its latest identities, in a few loops that run in C, and looks at nothing else that
could be out of date: writes to `vars(module)`, `module._modules` and `module._parameters` are seen as well as those by
`setattr`. A new identity takes a walk over the model. The part that each module adds to its hash is cached until the
module changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from . import attention, harmless, head
from .functions import closure_contents, inner_function, module_of, name_of
from .parts import modules_around, passes_arguments_on, text_config
from .sharding import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN = (bool, int, float, str, type(None))

MAX_IDENTITIES = 4
"""Number of identities of a model that are kept: in training and in evaluation, with adapters and without."""

_TENSORS = ("_parameters", "_buffers")

_variables_of = attrgetter("__dict__")  # faster than `vars`
_children_of = attrgetter("_modules")
_registries_of = attrgetter("_modules", *_TENSORS, *head.HOOKS)


class Identity:
    """What a model was at a time, in a form that a few calls in C compare with the model.

    Attributes and hooks of the model itself are left out, because they run around its wrapped forward, and so are
    tensors of a model that ranks hold parts of: engines replace them while it runs.

    Attributes:
        modules: in the order of `nn.Module.modules`, the model first, and functions that are modules.
        hash: valid in this process.
        verdict: what `deciding` has found out about the model as it was.
    """

    verdict: Any = None

    def __init__(self, model: PreTrainedModel, cache: dict[int, tuple[nn.Module, type, dict[str, Any], int]]):
        self.modules, self._configs = _modules_of(model), (model.config, text_config(model))
        self._copied = ("_modules",) if is_sharded(model) else ("_modules", *_TENSORS)
        self.hash = hash((attention.implementation(model), *(self._hash_of(x, cache) for x in self.modules)))
        others = self.modules[1:]
        self._empty = [registry for module in others for registry in _registries_of(module) if not registry]
        self._parents = [module for module in others if len(module._modules) > 1]
        self._hooked = [module for module in others if has_additions(module)]
        self._of_kinds: dict[type | str, list[nn.Module]] = {}
        own, *configs = self._of_model(model)
        copied = [_copied(own, self._copied), *(_copied(x, x) for x in configs)]
        self._was = [cache[id(module)][2] for module in others], copied, self._others(model)

    def describes(self, model: PreTrainedModel, attributes: list[dict[str, Any]]) -> bool:
        """Whether a model is as it was, given the present attributes of its other modules."""
        if self.modules[0] is not model or self._configs[0] is not model.config:
            return False
        were, *others = self._was
        if not _are_equal(attributes, were) or any(self._empty):  # first what tells modes and adapters apart
            return False
        return _are_equal([self._of_model(model), self._others(model)], others)

    @functools.cached_property
    def is_training(self) -> bool:
        """Whether all modules are in training mode, and `train` would do nothing else than set it."""
        from transformers import PreTrainedModel

        known = nn.Module.train, PreTrainedModel.train  # which replaces kernels when the mode changes
        has_own = any(type(x).train not in known or "train" in vars(x) for x in self.modules[1:])
        return not has_own and type(self.modules[0]).train in known and all(x.training for x in self.modules)

    def of_kind(self, kind: type | str) -> list[nn.Module]:
        """The modules of a class, or with an attribute of a name."""
        if kind not in self._of_kinds:
            self._of_kinds[kind] = _of_kind(self.modules, kind)
        return self._of_kinds[kind]

    def _of_model(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        return [{name: vars(model)[name] for name in self._copied}, *map(vars, self._configs)]

    def _others(self, model: PreTrainedModel) -> tuple[object, ...]:
        """What dictionaries do not tell: classes, the order in which `nn.Sequential` calls its children, hooks, which
        may close over values that have changed, and the head.
        """
        return (
            model.training,
            [*map(type, self.modules)],
            [*chain.from_iterable(map(_children_of, self._parents))],
            [tuple(additions_to(module)) for module in self._hooked],
            head.identity(head.head_of(model)),
        )

    def _hash_of(self, module: nn.Module, cache: dict[int, tuple[nn.Module, type, dict[str, Any], int]]) -> int:
        attributes, kind, is_model = vars(module), type(module), module is self.modules[0]
        cached = cache.get(id(module))
        if cached is None or cached[:2] != (module, kind) or not _are_equal(attributes, cached[2]):
            parts = kind if is_model else plain_attributes(module), *_kinds_of_tensors(module, self._copied)
            cached = cache[id(module)] = module, kind, _copied(attributes, self._copied), hash(parts)
        return hash((id(module), cached[3], *(additions_to(module) if has_additions(module) and not is_model else ())))


class Structure:
    """The latest identities of one model. Keeps its modules alive, so that no id is used twice."""

    def __init__(self) -> None:
        # By id of a module: the module, its class, its attributes, and the hash of plain ones.
        self._cache: dict[int, tuple[nn.Module, type, dict[str, Any], int]] = {}
        self._identities: list[Identity] = []  # of the same modules, the most recently used first

    def identity(self, model: PreTrainedModel) -> Identity:
        """The identity of the model as it is now. The same object as before if nothing has changed."""
        attributes = [*map(_variables_of, self._identities[0].modules[1:])] if self._identities else []
        latest = next((x for x in self._identities if x.describes(model, attributes)), None)
        if latest is None:
            latest = Identity(model, self._cache)
            if len(self._cache) > 2 * len(latest.modules):
                self._cache = {id(module): self._cache[id(module)] for module in latest.modules}
            self._identities = [x for x in self._identities if x.modules == latest.modules]  # no replaced module
        self._identities = [latest, *(x for x in self._identities if x is not latest)][:MAX_IDENTITIES]
        return latest

    def modules_of(self, model: nn.Module, kind: type | str) -> list[nn.Module]:
        """The modules of a class, or with an attribute of a name, that the model had when its identity was last asked
        for, or those that it has now if its identity is not known yet.
        """
        return self._identities[0].of_kind(kind) if self._identities else _of_kind(model.modules(), kind)


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, and the functions of modeling files that they call, which are modules where the package
    `kernels` is installed. A kernel may replace the forward of each.
    """
    modules = [*model.modules()]
    functions = (function for module in modules for function in vars(module).get("_kernel_funcs", {}).values())
    return [*modules, *dict.fromkeys(functions)]


class Wrapping:
    """Remembers `parts.passes_arguments_on` of models, until a module around their transformers model changes."""

    def __init__(self) -> None:
        # By id of a model: the modules from the outermost to the transformers model, how they were, and the answer.
        self._known: dict[int, tuple[list[nn.Module], list[tuple], bool]] = {}

    def passes_arguments_on(self, model: nn.Module) -> bool:
        modules, was, passes = self._known.get(id(model), ([], None, False))
        if was != [*map(_wrapping, modules)]:
            modules = [*modules_around(model)]
            passes = passes_arguments_on(model)
            self._known[id(model)] = modules, [*map(_wrapping, modules)], passes
        return passes


def _wrapping(module: nn.Module) -> tuple:
    hooks = {**module._forward_pre_hooks}, {**module._forward_pre_hooks_with_kwargs}
    return type(module).forward, vars(module).get("forward"), [*module._modules.values()], *hooks


def _of_kind(modules: Iterable[nn.Module], kind: type | str) -> list[nn.Module]:
    is_of: Any = hasattr if isinstance(kind, str) else isinstance
    return [module for module in modules if is_of(module, kind)]


def _copied(attributes: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Attributes in which dictionaries with these names are copied, too."""
    dicts = {name: dict(attributes[name]) for name in names if attributes[name] and type(attributes[name]) is dict}
    return {**attributes, **dicts}


def _kinds_of_tensors(module: nn.Module, registries: tuple[str, ...]) -> Iterator[tuple]:
    """The kind of each parameter and buffer among these attributes: code replaces tensors by others of their kind, as
    offloading does in each call. Caches of rotary embeddings grow.
    """
    for registry in _TENSORS if _TENSORS[0] in registries else ():
        for name, x in vars(module)[registry].items():
            yield name, type(x), getattr(x, "dtype", None), x is not None and registry == _TENSORS[0] and x.shape


def has_additions(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward of its own."""
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
