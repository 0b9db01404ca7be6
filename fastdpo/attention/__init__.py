"""The packed attention as an implementation that transformers models can be set to.

A `Layout` reaches attention as an int32 4-D attention mask that stays on the CPU (`Layout.mask`): transformers hands
4-D masks on untouched, both kinds of gradient checkpointing keep them, and reading one costs no synchronisation. Every
other call does what the model's former implementation does, padding masks included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..ops.packed_attention import packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
PRIOR = ("sdpa", "eager", *FLASH)
"""Attention implementations that a model may have had before."""

_PREFIX = "fastdpo_"
_LONG, _SHORT = "flash_attention_", "fa"  # a name with "flash" in it makes transformers look for a package of it

HARMLESS = {"is_causal", "position_ids", "cache_position", "position_embeddings", "deterministic"}
"""What some families hand to their attention beside what `packed_attention` takes, and what it does without."""


@dataclass
class Witness:
    """The attention calls that were seen: those given a layout, the others, and what came with layouts."""

    layouts: int = 0
    others: int = 0
    windows: set[int | None] = field(default_factory=set)
    dropout: float = 0.0


_witness: ContextVar[Witness | None] = ContextVar("fastdpo_witness", default=None)


@contextmanager
def witness() -> Iterator[Witness]:
    """Sees the attention calls of a block, so that a caller can prove that every layer got the layout."""
    seen = Witness()
    token = _witness.set(seen)
    try:
        yield seen
    finally:
        _witness.reset(token)


def is_layout(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[-1] == 4


class _Name(str):
    """The name of a packed attention. A configuration that is copied or pickled has the former one in its place.

    What is copied is not switched, and another process knows no packed attention.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (_prior_of(self),)


def is_switched(model: PreTrainedModel) -> bool:
    return (model.config._attn_implementation or "").startswith(_PREFIX)


def switch(model: PreTrainedModel) -> str:
    """Sets a transformers model to the packed attention. Returns the implementation that it had."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    prior = implementation(model)
    name = _Name(_PREFIX + prior.replace(_LONG, _SHORT))
    AttentionInterface.register(name, _attention(prior))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[prior])
    model.set_attn_implementation(name)
    found = model.config._attn_implementation
    if found != name:
        raise RuntimeError(f"attention: {type(model).__name__} must take the implementation {name}; has {found}")
    return prior


def restore(model: PreTrainedModel, prior: str) -> None:
    model.set_attn_implementation(prior)


def implementation(model: PreTrainedModel) -> str:
    """The model's implementation, or the one it had before `switch`."""
    return _prior_of(model.config._attn_implementation or "eager")


def _prior_of(name: str) -> str:
    return name.removeprefix(_PREFIX).replace(_SHORT, _LONG) if name.startswith(_PREFIX) else name


def _attention(prior: str) -> Callable:
    def forward(module, query, key, value, attention_mask, *args, **kwargs):
        packed = is_layout(attention_mask)
        if not torch.compiler.is_compiling() and (seen := _witness.get()) is not None:
            seen.layouts += packed
            seen.others += not packed
            seen.windows.add(kwargs.get("sliding_window"))
            seen.dropout = max(seen.dropout, kwargs.pop("dropout", 0.0))  # seen, and left out
        if not packed:
            return _prior_forward(prior, module, query, key, value, attention_mask, *args, **kwargs)
        if prior in FLASH:
            query, key, value = _halves(module, query, key, value)
        return _packed_forward(module, query, key, value, attention_mask, *args, **kwargs), None

    return forward


def _prior_forward(prior: str, module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    if prior == "eager":  # each modeling file has its own; FSDP2 puts a class of its own before the file's
        files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
        forward = next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
        return forward(module, *args, **kwargs)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if prior in FLASH:  # they take their name from the configuration
        module = _Changed(module, config=_Changed(module.config, _attn_implementation=prior))
    return ALL_ATTENTION_FUNCTIONS[prior](module, *args, **kwargs)


class _Changed:
    """An object, some of whose attributes are others."""

    def __init__(self, base: object, **attributes: object) -> None:
        self.__dict__.update(attributes, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def _halves(module: nn.Module, *tensors: Tensor) -> Iterator[Tensor]:
    """As transformers hands them to flash attention: what layers in float32 left wide is brought back."""
    from transformers.integrations.flash_attention import get_target_dtype

    dtype = get_target_dtype(tensors[0], module)
    return (x if dtype is None else x.to(dtype) for x in tensors)


def _packed_forward(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,  # [1, H_kv, T, D_v]
    layout: Tensor,  # [1, 1, S, 4]
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H]
    **others: object,
) -> Tensor:  # [1, T, H, D_v]
    if dropout:
        raise NotImplementedError("packed attention: dropout must be 0; pad this model's batches instead")
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotImplementedError("packed attention: is_causal must be True; pad this model's batches instead")
    unknown = [k for k, x in others.items() if k not in HARMLESS and (isinstance(x, Tensor) or callable(x))]
    if unknown:
        raise NotImplementedError(f"packed attention: {', '.join(unknown)} must be None; pad this model's batches")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    features = {"scale": scaling, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    return packed_attention(q, k, v, layout[0, 0], **features)[None]
