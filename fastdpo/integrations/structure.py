"""What a model consists of, compared from call to call: modules, classes, hooks, replaced forwards, plain attributes.

A verdict on a model, and values remembered of one, hold for as long as this is the same. It is looked at in every call,
so what has been read of a module is kept until its attributes differ from a copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import getclosurevars
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import attention
from . import heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN = (bool, int, float, str, type(None))
CHANGES_NOTHING = {
    *("training", "gradient_checkpointing", "max_seq_len_cached"),
    *("_disable_adapters", "_active_adapter"),
}
"""Plain attributes that trainers switch as they go, of which a verdict does not depend on any."""

COUNTERS = ("ds_", "_ds", "applied_pre_backward")
"""Beginnings of the names under which DeepSpeed keeps its counts on modules."""

NEUTRAL_HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}
"""Of transformers and PEFT, which add one more whenever gradient checkpointing is enabled."""


class Structure:
    """Of one model. Holds on to its modules, so that the id of one that is gone is not taken by another."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[nn.Module, type, dict[str, Any], int]] = {}

    def hash(self, model: PreTrainedModel) -> int:
        """Of this process alone. What is put on the model itself is left out: it runs around its wrapped forward."""
        parts: list[object] = [attention.implementation(model)]
        modules = 0
        for module in model.modules():
            modules += 1
            parts.append(self._of(module, whole=module is not model))
        if len(self._known) > 2 * modules:
            self._known = {id(module): self._known[id(module)] for module in model.modules()}
        return hash(tuple(parts))

    def _of(self, module: nn.Module, whole: bool) -> int:
        own, kind = vars(module), type(module)
        known = self._known.get(id(module))
        if known is None or known[0] is not module or known[1] is not kind or not _same(own, known[2]):
            known = self._known[id(module)] = (module, kind, dict(own), _plain(module, whole))
        added = whole and ("forward" in own or any(own[name] for name in heads.HOOKS))
        return hash((id(module), known[3], *(additions_to(module) if added else ())))


def additions_to(module: nn.Module) -> Iterator[object]:
    """What identifies the hooks on a module, and a forward in place of its class's; not that of `heads.install`."""
    seen = {
        _identity(hook) for hook in heads.hooks_of(module) if heads.name_of(hook).split(".")[-1] not in NEUTRAL_HOOKS
    }
    yield from sorted(seen, key=hash)
    forward = vars(module).get("forward")
    if forward is not None and not heads.is_ours(forward):
        yield _identity(forward)


def _plain(module: nn.Module, whole: bool) -> int:
    plain = ((name, x) for name, x in vars(module).items() if type(x) in PLAIN and name not in CHANGES_NOTHING)
    kept = tuple((name, x) for name, x in plain if not name.startswith(COUNTERS)) if whole else ()
    return hash((id(type(module)), kept))


def _same(own: dict[str, Any], copy: dict[str, Any]) -> bool:
    try:
        return own == copy  # by identity first: what is the same object is not looked into
    except (RuntimeError, ValueError):  # of tensors and arrays
        return False


def _identity(function: Callable) -> tuple:
    """The same for a function that is made again of the same code and over the same values, as hooks are."""
    owner = id(getattr(function, "__self__", None))
    function = heads.function_of(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return id(type(function)), owner
    values = [*(getattr(function, "__defaults__", None) or ()), *getclosurevars(function).nonlocals.values()]
    return id(code), owner, *((type(x), x) if type(x) in PLAIN else id(x) for x in values)
