"""Judges by a model's configuration and modules whether it can be packed.

No model is known by its name here. `probe.py` then compares a packed run with a padded one.
"""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING

from torch import nn

from ...reasons import Reason
from .. import attention
from ..head import head_of
from ..identity.functions import (
    HOOKS,
    Code,
    forwards_of,
    hooks_of,
    hooks_of_every_module,
    inner_function,
    module_of,
    name_of,
    of_users,
)
from ..identity.harmless import CODE, FORWARD_WRAPPERS, HOOKING, is_of
from ..mixers import finding
from ..parts import PASSING, language_model, modules_around, rope_limit, text_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from transformers import PreTrainedModel

LAYER_TYPES = {"full_attention", "sliding_attention"}

LAYER_TYPES_WITH_MIXERS = {*LAYER_TYPES, "linear_attention", "conv", "hybrid", "mlp", "moe"}

KERNELS = ("causal_conv1d", "mamba_ssm", "fla", "flash_attn", "kernels", "numpy", "einops")
"""Packages whose functions modeling files of transformers import."""


def unsupported_reason(model: PreTrainedModel) -> Reason | None:
    """Returns why a model's configuration or modules rule out packing, or None if nothing is known."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return Reason("encoder-decoder", model=name)
    if config.get_text_config() is not config:
        text = language_model(model)
        return Reason("no-language-model", model=name) if text is model else unsupported_reason(text)
    if getattr(config, "cross_attention_layers", None):
        return Reason("cross-attention", model=name)
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return Reason("bidirectional", model=name)
    if getattr(config, "alibi", False):
        return Reason("alibi", model=name)
    if not model._can_set_attn_implementation():
        return Reason("fixed-attention", model=name)
    reason = finding.unsupported_reason(model)
    if reason is not None:
        return reason
    supported_layers = LAYER_TYPES_WITH_MIXERS if finding.mixers_of(model) else LAYER_TYPES
    other_layers = set(getattr(config, "layer_types", None) or ()) - supported_layers
    if other_layers:
        return Reason("layer-types", types=", ".join(sorted(other_layers)))
    prior = attention.implementation(model)
    if attention.repository(prior) not in attention.SUPPORTED_PRIORS:
        supported = ", ".join(attention.SUPPORTED_PRIORS)
        return Reason("attention-implementation", given=prior, supported=supported)
    if getattr(config, "reorder_and_upcast_attn", False):
        return Reason("upcast-attention")
    return None


def forward_unsupported_reason(model: PreTrainedModel) -> Reason | None:
    """Returns why a model's logits are not those of its class's forward, or None if they are."""
    forward = next(_forwards(model, FORWARD_WRAPPERS), None)
    return None if forward is None else Reason("replaced-forward", function=name_of(forward))


def output_reason(*modules: nn.Module) -> Reason | None:
    """Returns what may expect logits in the output of these modules: hooks and forwards of user code. None if nothing
    does.
    """
    hooks = _named(_attached(modules, HOOKS[1:], PASSING))
    return Reason("output-hooks", hooks=hooks) if hooks else None


def wrapping_reason(model: nn.Module) -> Reason | None:
    """`output_reason` of the modules around the transformers model in a model, which cannot look at them itself."""
    *around, _ = modules_around(model)
    return output_reason(*around)


def hooks_reason(model: PreTrainedModel) -> Reason | None:
    """Returns which hooks and replaced forwards of user code see the activations inside of a model, or None if none
    does. Those of the head have reasons of their own (see `head.unsupported_reason`).
    """
    inside = (x for x in model.modules() if x is not model and x is not head_of(model))
    attached = _attached(inside, HOOKS, (*HOOKING, *CODE))
    hooks = _named([*of_users(hooks_of_every_module()), *attached])
    return Reason("user-hooks", hooks=hooks) if hooks else None


def _named(hooks: list[Callable]) -> str:
    return ", ".join(sorted({*map(name_of, hooks)}))


def _attached(modules: Iterable[nn.Module], names: tuple[str, ...], packages: tuple[str, ...]) -> list[Callable]:
    """The hooks of users in these attributes of modules, and what code of other packages than these has set in the
    place of their forwards, or around these.
    """
    return [x for module in modules for x in (*of_users(hooks_of(module, names)), *_forwards(module, packages))]


def _forwards(module: nn.Module, packages: tuple[str, ...]) -> Iterator[Callable]:
    for forward in forwards_of(module):
        if inner_function(forward) is type(module).forward:
            return
        if is_of(module_of(forward), packages):
            continue
        # That of another class may be by the package `kernels`, on a module that says which kernels it has.
        if "<locals>" in name_of(forward) or not hasattr(module, "kernel_layer_name"):
            yield forward


def rope_reason(model: PreTrainedModel, width: int) -> Reason | None:
    """Returns that the results of a row depend on the width of its batch, if they do in a batch that is
    this wide.
    """
    limit = rope_limit(model)
    return None if limit is None or width <= limit else Reason("rope-width", limit=limit)


def has_own_code(model: PreTrainedModel) -> bool:
    """Whether classes of a model's modules, forwards in their place, or functions of their modeling files and of its
    attention come from packages that are not known.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    functions = [x for module in model.modules() for x in forwards_of(module)]
    functions += [x for x in Code(kinds).functions if isinstance(x, FunctionType | BuiltinFunctionType)]
    functions += [x for x in attention.functions_of(text_config(model))[1:] if x is not None]
    written_in = {kind.__module__ for module in model.modules() for kind in type(module).__mro__ if kind is not object}
    written_in |= {name for name in map(module_of, functions) if not is_of(name, KERNELS)}
    return not all(is_of(x, CODE) or x.partition(".")[0] in sys.stdlib_module_names for x in written_in)
