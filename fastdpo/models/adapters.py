"""PEFT's adapters in a model: the modules that hold them, which of them are active, and others in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..reasons import Reason
from .identity.harmless import ADAPTER_ENTRIES

if TYPE_CHECKING:
    from peft import PeftModel

WRAPPED = {"base_layer", "original_module", "_orig_mod", "_checkpoint_wrapped_module"}
"""Names under which PEFT, `torch.compile` and checkpoint wrappers hold the module that they wrap.
"""


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers and the names that their modules had before wrapping."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            yield ".".join(part for part in name.split(".") if part not in WRAPPED), module


def unsupported_reason(model: nn.Module) -> Reason | None:
    """Returns which active adapter works on the padded rows of a call, or None if none does."""
    for _, module in adapter_modules(model):
        variants = getattr(module, "lora_variant", {})
        for name in sorted(_active(module) & variants.keys()):
            if type(variants[name]).__name__ == "ALoraLinearVariant":
                return Reason("activated-adapter", adapter=name)
    return None


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


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that a PeftModel wraps. Any other model is returned as it is."""
    from accelerate.utils import is_peft_model

    return cast("PeftModel", model).get_base_model() if is_peft_model(model) else model


@contextmanager
def with_adapter(model: nn.Module, adapter: str | None, op: str) -> Iterator[None]:
    """Activates only this adapter of a PeftModel for the block, or none.
    Leaves any other model as it is.

    Args:
        model: the model.
        adapter: the adapter's name.
        op: what needs it, for the messages of errors.

    Raises:
        ValueError: the model has no such adapter, or one of virtual tokens.
    """
    wrapper = peft_model(model)
    if wrapper is None:
        if adapter is not None:
            raise ValueError(f"{op}: adapter must be None without a PeftModel; got {adapter!r}")
        yield
        return
    if adapter is None:
        with wrapper.disable_adapter():
            yield
        return
    configs = wrapper.peft_config
    if adapter not in configs or configs[adapter].is_prompt_learning:
        known = [name for name, config in configs.items() if not config.is_prompt_learning]
        raise ValueError(f"{op}: adapter must be one of {known}, none of virtual tokens; got {adapter!r}")
    previous, trainable = wrapper.active_adapter, [p for p in model.parameters() if p.requires_grad]
    wrapper.set_adapter(adapter)
    try:
        yield
    finally:
        wrapper.set_adapter(cast(str, previous))
        model.requires_grad_(False)  # PEFT makes trainable whatever it activates
        for parameter in trainable:
            parameter.requires_grad_(True)


def peft_model(model: nn.Module) -> PeftModel | None:
    """The PeftModel in a model, if there is one."""
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel

    return next((module for module in model.modules() if isinstance(module, PeftModel)), None)
