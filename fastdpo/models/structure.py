"""The structure of a model as a hash: modules, their classes, hooks, replaced forwards and plain
attributes.

The probe's result for a model, and log-probabilities remembered from it, are valid as long as its
structure stays the same. The hash is computed for every call, so the part that each module adds to
it is cached until the module's attributes change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from . import attention, head
from .functions import closure_contents, inner_function, module_of, name_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN = (bool, int, float, str, type(None))
IGNORED_ATTRIBUTES = {
    *("training", "gradient_checkpointing", "max_seq_len_cached"),
    *("_disable_adapters", "_active_adapter", "_output_capturing_hooks_installed", "rope_deltas"),
}
"""Plain attributes that change during training and that the results do not depend on."""

COUNTERS = ("ds_", "_ds", "applied_pre_backward")
"""Prefixes of the counters that DeepSpeed keeps on modules."""

NEUTRAL_HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}
"""Hooks of transformers and PEFT, which add another one each time
gradient checkpointing is enabled.
"""

NEUTRAL_MODULES = {"fastdpo.models.mixers.hooks", "transformers.utils.output_capturing"}
"""Modules of the hooks by which mixers take layouts, and of those that record hidden states, which
transformers adds when a model is first asked for them.
"""


class Structure:
    """Computes the structure hash of one model. Keeps its modules
    alive, so that no id is used twice.
    """

    def __init__(self) -> None:
        # By id of a module: the module, its class, its attributes, and the hash of plain ones.
        self._cache: dict[int, tuple[nn.Module, type, dict[str, Any], int]] = {}

    def hash(self, model: PreTrainedModel) -> int:
        """The hash of the model's structure, valid in this process.

        Leaves out hooks on the model itself, because they run around its wrapped forward.
        """
        parts: list[object] = [attention.implementation(model)]
        modules = 0
        for module in model.modules():
            modules += 1
            parts.append(self._hash_of(module, is_model=module is model))
        if len(self._cache) > 2 * modules:
            self._cache = {id(module): self._cache[id(module)] for module in model.modules()}
        return hash(tuple(parts))

    def _hash_of(self, module: nn.Module, is_model: bool) -> int:
        attributes, kind = vars(module), type(module)
        cached = self._cache.get(id(module))
        if cached is None or cached[0] is not module or cached[1] is not kind or not _equal(attributes, cached[2]):
            cached = (module, kind, dict(attributes), hash(kind if is_model else plain_attributes(module)))
            self._cache[id(module)] = cached
        has_additions = "forward" in attributes or any(attributes[name] for name in head.HOOKS)
        return hash((id(module), cached[3], *(additions_to(module) if has_additions and not is_model else ())))


def additions_to(module: nn.Module) -> Iterator[object]:
    """Identifies the hooks on a module and a replaced forward, except
    those that fastdpo sets.
    """
    for hook in head.hooks_of(module):
        if name_of(hook).split(".")[-1] not in NEUTRAL_HOOKS and module_of(hook) not in NEUTRAL_MODULES:
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
        if type(x) in PLAIN and name not in IGNORED_ATTRIBUTES and not name.startswith(COUNTERS)
    )
    return type(module), tuple(kept)


def _equal(attributes: dict[str, Any], cached: dict[str, Any]) -> bool:
    try:
        return attributes == cached  # compares by identity first, and so does not look into the same object
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
