"""The structure of a model as a hash: modules, their classes, hooks, replaced forwards and plain attributes.

The verdict on a model, and log-probabilities remembered of it, are valid as long as its structure stays the same. The
hash is computed in every call, so the part of each module is cached until the attributes of the module change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
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
"""Plain attributes that trainers switch during a training, and that no verdict depends on."""

COUNTERS = ("ds_", "_ds", "applied_pre_backward")
"""Prefixes of the counters that DeepSpeed keeps on modules."""

NEUTRAL_HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}
"""Hooks of transformers and PEFT. They add one more each time gradient checkpointing is enabled."""


class Structure:
    """Computes the structure of one model. Keeps its modules alive, so that no new module can reuse an id."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[nn.Module, type, dict[str, Any], int]] = {}

    def hash(self, model: PreTrainedModel) -> int:
        """The hash of the model's structure, valid in this process.

        Leaves out hooks on the model itself: they run around its wrapped forward.
        """
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
    """Identifies the hooks on a module and a replaced forward, except the one that `heads.install` sets."""
    for hook in heads.hooks_of(module):
        if heads.name_of(hook).split(".")[-1] not in NEUTRAL_HOOKS:
            yield _identity(hook)
    forward = vars(module).get("forward")
    if forward is not None and not heads.is_ours(forward):
        yield _identity(forward)


def _plain(module: nn.Module, whole: bool) -> int:
    plain = ((name, x) for name, x in vars(module).items() if type(x) in PLAIN and name not in CHANGES_NOTHING)
    kept = tuple((name, x) for name, x in plain if not name.startswith(COUNTERS)) if whole else ()
    return hash((id(type(module)), kept))


def _same(own: dict[str, Any], copy: dict[str, Any]) -> bool:
    try:
        return own == copy  # compares by identity first, and so doesn't look into the same object
    except (RuntimeError, ValueError):  # raised by tensors and arrays
        return False


def _identity(function: Callable) -> tuple:
    """Identifies a function by its code, its owner and the values it closes over: hooks are often created anew."""
    owner = id(getattr(function, "__self__", None))
    function = heads.function_of(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return id(type(function)), owner
    values = [*(function.__defaults__ or ())]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty
            values.append(cell.cell_contents)
    return id(code), owner, *((type(x), x) if type(x) in PLAIN else id(x) for x in values)
