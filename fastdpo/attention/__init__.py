"""The packed attention as an implementation that transformers models can be set to.

A `Layout` reaches attention as an int32 4-D attention mask that stays on the CPU (`Layout.mask`): transformers hands
4-D masks on untouched, both kinds of gradient checkpointing keep them, and reading one costs no synchronisation. Every
other call does what the model's former implementation does, padding masks included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..ops.packed_attention import packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRIOR = ("sdpa", "eager")
"""Attention implementations that a model may have had before."""

_PREFIX = "fastdpo_"


class Handshake:
    """Counts the attention calls that were given a layout, so that a caller can prove that its layers saw it."""

    calls = 0


def is_layout(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[-1] == 4


def switch(model: PreTrainedModel) -> str:
    """Sets a transformers model to the packed attention. Returns the implementation that it had."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    prior = implementation(model)
    name = _PREFIX + prior
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
    return (model.config._attn_implementation or "eager").removeprefix(_PREFIX)


def _attention(prior: str) -> Callable:
    def forward(module, query, key, value, attention_mask, *args, **kwargs):
        if not is_layout(attention_mask):
            return _prior_forward(prior, module)(module, query, key, value, attention_mask, *args, **kwargs)
        return _packed_forward(query, key, value, attention_mask, *args, **kwargs), None

    return forward


def _prior_forward(prior: str, module: nn.Module) -> Callable:
    if prior == "eager":  # each modeling file has its own
        return sys.modules[type(module).__module__].eager_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[prior]


def _packed_forward(
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,  # [1, H_kv, T, D_v]
    layout: Tensor,  # [1, 1, S, 4]
    dropout: float = 0.0,
    scaling: float | None = None,
    **features: object,
) -> Tensor:  # [1, T, H, D_v]
    Handshake.calls += 1
    asked: dict[str, object] = {"dropout": dropout or None}
    asked.update((name, features.get(name)) for name in ("sliding_window", "softcap", "s_aux", "position_bias"))
    unsupported = [name for name, value in asked.items() if value is not None]
    if unsupported:
        raise NotImplementedError(
            f"packed attention: {', '.join(unsupported)} must be off; pad this model's batches instead"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q, k, v, layout[0, 0], scale=scaling)[None]
