"""Identities of a model: its modules, their classes, tensors, hooks, replaced forwards and attributes, what lists,
dictionaries and objects among these hold, and its configuration.

What is known of a model holds as long as its identity stays the same. The probe's result for a model holds for all of
its identities with the same hash, which leaves out what it does not depend on, such as modes and the values of
parameters.

Each call compares the model with its latest identities, in a few loops that run in C, and looks at nothing else that
could be out of date: writes to `vars(module)`, `module._modules` and `module._parameters` are seen as well as those by
`setattr`. A new identity takes a walk over the model. The part that each module adds to its hash is cached until the
module changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from .. import attention, head
from ..parts import text_config
from ..ranks.sharding import is_sharded
from .contents import (
    Container,
    attributes_of,
    configuration_entries,
    containers_in,
    copy_of,
    digest_of,
    is_configuration,
    is_own,
    is_rotary,
    plain_members,
)
from .functions import (
    HOOKS,
    PLAIN,
    Code,
    has_additions,
    hook_identities,
    hooks_of,
    hooks_of_every_module,
    identity_of,
    is_named_hook,
    name_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_IDENTITIES = 4
"""Number of identities of a model that are kept: in training and in evaluation, with adapters and without."""

_TENSORS = ("_parameters", "_buffers")

_variables_of = attrgetter("__dict__")  # faster than `vars`
_children_of = attrgetter("_modules")
_tensors_of = attrgetter(*_TENSORS)
_registries_of = attrgetter("_modules", *_TENSORS, *HOOKS)
_version_of = attrgetter("_version")
_is_trained = attrgetter("requires_grad")
_is_training = attrgetter("training")


class _ModuleIdentity(NamedTuple):
    """What an identity knows of one module.

    Attributes:
        module, kind: the module and its class.
        attributes: of the module, with copies of its registries.
        containers: in its attributes.
        copies: of these.
        buffers: those whose values matter.
        written: where they lie, and how often each has been written to.
        sizes: of the registries, of which copies of attributes hold empty ones themselves.
        hash: of what results depend on.
        form: of the same without plain values and the values of buffers.
    """

    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    containers: list[Container]
    copies: list[Container]
    buffers: list[Tensor]
    written: list[tuple[int, int]]
    sizes: list[int]
    hash: int
    form: int

    def describes(self, module: nn.Module) -> bool:
        return (
            (self.module, self.kind) == (module, type(module))
            and are_equal(vars(module), self.attributes)
            and are_equal(self.containers, self.copies)
            and _written(self.buffers) == self.written
            and [*map(len, _registries_of(module))] == self.sizes
        )

    @classmethod
    def of(cls, module: nn.Module, registries: tuple[str, ...]) -> _ModuleIdentity:
        containers = [*containers_in(x for name, x in vars(module).items() if is_own(name))]
        versioned = [x for x in module._buffers.values() if type(x) is Tensor and not x.is_inference()]
        buffers = [] if is_rotary(module) else versioned
        kinds = _kinds_of_tensors(module) if _TENSORS[0] in registries else ()
        values = [digest_of(x) for x in buffers]
        members = ((name, plain_members(x)) for name, x in attributes_of(module).items())
        plain = [(name, x) for name, x in members if x is not None]
        return cls(
            *(module, type(module), _copied(vars(module), registries)),
            *(containers, [*map(copy_of, containers)], buffers, _written(buffers), [*map(len, _registries_of(module))]),
            hash((type(module), *plain, *kinds, *values)),
            hash((type(module), *kinds)),
        )


class Identity:
    """What a model was at a time, in a form that a few calls in C compare with the model.

    Attributes of the model itself other than plain values are left out, and so are its hooks, because they run around
    its wrapped forward, and parameters of a model that ranks hold parts of: engines replace them while it runs.

    Attributes:
        modules: in the order of `nn.Module.modules`, the model first, and functions that are modules.
        called: those inside of the model, without holders (see `_is_holder`).
        of_kinds: those of a class, or with an attribute of a name, as far as they were asked for.
        kinds: a hash of the classes of all modules, of what replaces their forwards, and of their hooks.
        code: a hash of all that results depend on but for values of parameters. Equal for an equal model.
        form: of this model, but for plain values, those of buffers and those in the configuration.
        hash: of this model. Valid in this process, as the others are.
        trained: which parameters are trained, as a number that is not 0. It is 0 if none is, and in evaluation mode.
        verdict: what `deciding` has found out about the model as it was.
        switch: by which `integrations.switching` disables and enables adapters in the model as it was.
    """

    verdict: Any = None
    switch: Any = None

    def __init__(self, model: PreTrainedModel, cache: dict[int, _ModuleIdentity]):
        sharded = is_sharded(model)
        self.modules = _modules_of(model)
        self._copied = ("_modules",) if sharded else ("_modules", *_TENSORS)
        of_modules = [self._identity_of(module, cache) for module in self.modules]
        others = self.modules[1:]
        self.called = [module for module in others if not _is_holder(module)]
        self._holders = [module for module in others if _is_holder(module)]
        registries = [_tensors_of(model), *map(_registries_of, self.called), *map(_parameters_in, self._holders)]
        self._empty = [registry for registry in chain.from_iterable(registries) if not registry]
        self._parents = [module for module in others if len(module._modules) > 1]
        self._hooked = [module for module in self.called if has_additions(module)]
        self._head = head.head_of(model)
        self.of_kinds: dict[type | str, list[nn.Module]] = {}
        containers = {id(x): (x, y) for m in of_modules for x, y in zip(m.containers, m.copies, strict=True)}
        self._containers, self._contents = map(list, zip(*containers.values(), strict=True))
        self._buffers = [x for m in of_modules for x in m.buffers]
        parameters = [*model.parameters()]
        trained = tuple(map(_is_trained, parameters)) if model.training else ()
        self.trained = (1 if sharded else hash(trained)) if any(trained) else 0
        self._frozen = [] if sharded else [x for x in parameters if not x.requires_grad]
        configs = {id(x): x for x in (vars(y).get("config") for y in self.modules) if is_configuration(type(x))}
        self._config = text_config(model)
        of_attention = attention.functions_of(self._config)
        self._code = Code({*map(type, self.modules)})
        additions = [(id(module), *x) for module in self._hooked for x in additions_to(module)]
        additions += [(None, *x) for x in hook_identities(hooks_of_every_module())]
        hooks = {(type(x), name_of(hook)) for x in self._hooked for hook in hooks_of(x) if not is_named_hook(hook)}
        self.kinds = hash((*map(type, self.modules), self._code.hash, frozenset(hooks), *(x[1] for x in additions)))
        entries = map(configuration_entries, configs.values())
        self.code = hash((self.kinds, *of_attention, *(x.hash for x in of_modules), *entries))
        own = *map(id, self.modules), *of_attention, *additions
        self.form = hash((self.kinds, *own, *(x.form for x in of_modules)))
        self.hash = hash((self.code, *own))
        self._attributes = [cache[id(module)].attributes for module in self.called]
        members = [vars(module)[name] for module in self.modules for name in self._copied[1:]]
        members += [*map(vars, self.called), *(x for x in self._containers if isinstance(x, dict))]
        self._single = [(x, k, y) for x in members for k, y in x.items() if isinstance(y, Tensor) and y.numel() == 1]
        self._of_model_was = _copied(self._of_model(model), self._copied)
        self._others_were = self._others(model)
        self._children_were = [dict(module._modules) for module in self._holders]

    def describes(self, model: PreTrainedModel, attributes: list[dict[str, Any]]) -> bool:
        """Whether a model is as it was, given the present attributes of the modules that are called in it."""
        return (
            self.modules[0] is model
            and are_equal(attributes, self._attributes)  # first, since it tells modes and adapters apart
            and not any(self._empty)
            and are_equal(self._containers, self._contents)
            and are_equal([*map(_children_of, self._holders)], self._children_were)
            and are_equal(self._of_model(model), self._of_model_was)
            and are_equal(self._others(model), self._others_were)
            and self._code.is_unchanged()
            and all(x[key] is y for x, key, y in self._single)  # equal ones may be others
        )

    def _of_model(self, model: PreTrainedModel) -> dict[str, Any]:
        """The plain attributes of the model, and its registries of modules and tensors."""
        return {name: x for name, x in vars(model).items() if type(x) in PLAIN or name in self._copied}

    def _others(self, model: PreTrainedModel) -> tuple[object, ...]:
        """What dictionaries do not tell: classes, the order in which `nn.Sequential` calls its children, hooks, which
        may close over values that have changed, functions of attention, the head, writes to buffers, and whether more
        parameters are trained.
        """
        return (
            model.config,
            [*map(type, self.modules)],
            [*chain.from_iterable(map(_children_of, self._parents))],
            [tuple(additions_to(module)) for module in self._hooked],
            [*hook_identities(hooks_of_every_module())],
            attention.functions_of(self._config),
            head.identity(self._head),
            _written(self._buffers),
            model.training and any(map(_is_trained, self._frozen)),
        )

    def _identity_of(self, module: nn.Module, cache: dict[int, _ModuleIdentity]) -> _ModuleIdentity:
        known = cache.get(id(module))
        if known is None or not known.describes(module):
            known = cache[id(module)] = _ModuleIdentity.of(module, self._copied)
        return known


class Structure:
    """The latest identities of one model. Keeps its modules alive, so that no id is used twice.

    Attributes:
        identities: of the same modules, the most recently used first.
    """

    def __init__(self) -> None:
        self._cache: dict[int, _ModuleIdentity] = {}  # by id of a module
        self.identities: list[Identity] = []

    def identity(self, model: PreTrainedModel) -> Identity:
        """The identity of the model as it is now. The same object as before if nothing has changed."""
        attributes = [*map(_variables_of, self.identities[0].called)] if self.identities else []
        latest = next((x for x in self.identities if x.describes(model, attributes)), None)
        if latest is None:
            latest = Identity(model, self._cache)
            if len(self._cache) > 2 * len(latest.modules):
                self._cache = {id(module): self._cache[id(module)] for module in latest.modules}
            self.identities = [x for x in self.identities if x.modules == latest.modules]  # no replaced module
        self.identities = [latest, *(x for x in self.identities if x is not latest)][:MAX_IDENTITIES]
        return latest

    def forget_verdicts(self) -> None:
        """Has the next call of the model ask again what has been found out about it."""
        for identity in self.identities:
            identity.verdict = None

    def modules_of(self, model: nn.Module, kind: type | str) -> list[nn.Module]:
        """The modules of a class, or with an attribute of a name, that the model had when its identity was last asked
        for, or those that it has now if its identity is not known yet.
        """
        latest = self.identities[0] if self.identities else None
        modules, known = (latest.modules, latest.of_kinds) if latest else (model.modules(), {})
        if kind not in known:
            is_of: Any = hasattr if isinstance(kind, str) else isinstance
            known[kind] = [module for module in modules if is_of(module, kind)]
        return known[kind]


def _is_holder(module: nn.Module) -> bool:
    """Whether only the children of a module matter: a quarter of a model with LoRA is dictionaries, many of them empty,
    that are not called.
    """
    return type(module) is nn.ModuleDict or (type(module) is nn.ParameterDict and not any(_parameters_in(module)))


def _parameters_in(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The dictionaries that hold the parameters of a holder, and the names of these."""
    yield module._parameters
    yield vars(module).get("_keys", {})


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, and the functions of modeling files that they call, which are modules where the package
    `kernels` is installed. A kernel may replace the forward of each.
    """
    modules = [*model.modules()]
    functions = (function for module in modules for function in vars(module).get("_kernel_funcs", {}).values())
    return [*modules, *dict.fromkeys(functions)]


def is_training(model: PreTrainedModel) -> bool:
    """Whether all modules are in training mode, and `train` would do nothing else than set it.

    A walk in a few loops that run in C takes less time than an identity.
    """
    from transformers import PreTrainedModel

    inner: list[nn.Module] = []
    level: list[nn.Module] = [model]
    while level:
        level = [x for children in map(_children_of, level) for x in children.values() if x is not None]
        inner += level
    known = nn.Module.train, PreTrainedModel.train  # which replaces kernels when the mode changes
    has_own = any(x.train not in known for x in {*map(type, inner)}) or any("train" in x for x in map(vars, inner))
    return not has_own and type(model).train in known and model.training and all(map(_is_training, inner))


def _copied(attributes: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Attributes in which dictionaries with these names are copied, too."""
    dicts = {name: dict(attributes[name]) for name in names if attributes[name] and type(attributes[name]) is dict}
    copy = attributes.copy()  # with the same table of keys as other modules of its class, so that less memory is read
    copy.update(dicts)
    return copy


def _kinds_of_tensors(module: nn.Module) -> Iterator[tuple]:
    """The kind of each parameter and buffer: code replaces tensors by others of their kind, as offloading does in each
    call. Caches of rotary embeddings grow.
    """
    for registry in _TENSORS:
        for name, x in vars(module)[registry].items():
            yield name, type(x), getattr(x, "dtype", None), x is not None and registry == _TENSORS[0] and x.shape


def _written(buffers: list[Tensor]) -> list[tuple[int, int]]:
    """Where buffers lie, and how often each has been written to."""
    return [*zip(map(Tensor.data_ptr, buffers), map(_version_of, buffers), strict=True)]


def additions_to(module: nn.Module) -> Iterator[tuple]:
    """Identifies the hooks on a module (see `hook_identities`) and a replaced forward, except that of fastdpo."""
    yield from hook_identities(hooks_of(module))
    forward = vars(module).get("forward")
    if head.is_installed(forward):
        forward = vars(module).get(head.OWN_FORWARD)
    if forward is not None:
        yield identity_of(forward)


def are_equal(present: object, cached: object) -> bool:
    try:
        return bool(present == cached)  # values that are the same object are equal, whatever they are
    except (RuntimeError, ValueError):  # raised by tensors and arrays
        return False
