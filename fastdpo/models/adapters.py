"""PEFT's adapters in a model: the modules that hold them, and which of them are active."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .harmless import ADAPTER_ENTRIES

WRAPPED = {"base_layer", "original_module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Names under which PEFT, `torch.compile` and checkpoint wrappers hold the module that they wrap.
"""


def unwrapped(name: str) -> str:
    """The name that a parameter or a module had before its module was wrapped."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers and the names that their modules had before wrapping."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            yield unwrapped(name), module


def active_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the model would use now, which excludes those of inactive adapters."""
    is_inactive = inactive_names(model)
    return [x for name, x in model.named_parameters() if not is_inactive(unwrapped(name))]


def active_adapters(model: nn.Module) -> dict[str, object]:
    """The configurations of the active adapters by their names."""
    active: set[str] = set().union(*(_active(module) for _, module in adapter_modules(model)))
    configs = [vars(module).get("peft_config") or {} for module in model.modules()]
    return {
        name: {entry: x for entry, x in config.to_dict().items() if entry not in ADAPTER_ENTRIES}
        for each in configs
        for name, config in each.items()
        if name in active
    }


def adapter_states(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state that PEFT's layers hold for active adapters: scalings, and
    adapters merged into the weights.
    """
    for name, module in adapter_modules(model):
        active = _active(module)
        state: dict[str, Any] = {
            attribute: {adapter: x[adapter] for adapter in sorted(active & x.keys())}
            for attribute, x in vars(module).items()
            if type(x) is dict and active & x.keys()
        }
        merged = getattr(module, "merged_adapters", None)
        if merged:  # also if inactive: the forward of an inactive layer unmerges them first
            state["merged_adapters"] = list(merged)
        if state:
            yield name, {**state, "class": type(module).__qualname__}


def inactive_names(model: nn.Module) -> Callable[[str], bool]:
    """Tells whether an unwrapped name is that of a tensor or module of an inactive adapter:
    `module.container.adapter...`.
    """
    modules: dict[str, tuple[set[str], set[str]]] = {}
    for name, module in adapter_modules(model):
        containers = (*module.adapter_layer_names, *getattr(module, "other_param_names", ()))
        modules[name] = ({container.split(".")[0] for container in containers}, _active(module))

    def is_inactive(name: str) -> bool:
        parts = name.split(".")
        for i in range(len(parts) - 1, 0, -1):
            containers, active = modules.get(".".join(parts[:i]), (set(), set()))
            if parts[i] in containers:
                return i + 1 == len(parts) or parts[i + 1] not in active
        return False

    return is_inactive


def _active(module: Any) -> set[str]:
    return set() if module.disable_adapters else set(module.active_adapters)
