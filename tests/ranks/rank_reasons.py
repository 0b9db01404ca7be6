"""Reasons to fall back that one rank alone has. None of them changes what a model computes.

`OF_CALLS` change the arguments of a call, `AGREED` a model before it is trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

Arguments = tuple[tuple, dict[str, Any]]


def positional(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Arguments:
    return (ids,), kwargs


def without_mask(model: PreTrainedModel, ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Arguments:
    """Rows are padded on the right, so no token that is scored sees padding."""
    return (), dict(kwargs, input_ids=ids)


def positions(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Arguments:
    return (), dict(kwargs, input_ids=ids, position_ids=torch.arange(ids.shape[1])[None])


def whole_mask(model: PreTrainedModel, ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Arguments:
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    return (), dict(kwargs, input_ids=ids, attention_mask=causal & (attention_mask[:, None, None] != 0))


def types_of_tokens(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Arguments:
    return (), dict(kwargs, input_ids=ids, mm_token_type_ids=torch.zeros_like(ids))


def hole(model: PreTrainedModel, ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Arguments:
    return (), dict(kwargs, input_ids=ids, attention_mask=attention_mask.index_fill(1, torch.tensor(1), 0))


OF_CALLS: dict[str, Callable[..., Arguments]] = {
    "positional-arguments": positional,
    "no-input-ids": without_mask,
    "unsupported-argument": positions,
    "attention-mask": whole_mask,
    "text-model": types_of_tokens,
    "mask-holes": hole,
}
"""By the name of the reason, the change of a call's arguments."""


def change_each_call(model: PreTrainedModel) -> None:
    """Gives each call of a model another reason, in the order of `OF_CALLS`."""
    changes = list(OF_CALLS.values())
    calls = 0

    def change(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        nonlocal calls
        calls += 1
        kwargs = dict(kwargs)
        return changes[(calls - 1) % len(changes)](model, kwargs.pop("input_ids"), **kwargs)

    model.register_forward_pre_hook(change, with_kwargs=True)


def hook_head(model: PreTrainedModel) -> None:
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: None)


def replace_forward_of_head(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    head.forward = functools.partial(nn.Linear.forward, head)


def count_in_a_buffer(model: PreTrainedModel) -> None:
    model.model.norm.register_buffer("calls", torch.zeros(()))
    model.model.norm.register_forward_hook(lambda module, args, output: module.calls.add_(1) and None)


def drop_attention(model: PreTrainedModel) -> None:
    """Sets a probability of dropout that no random number is below."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-12


def fail_packed(model: PreTrainedModel) -> None:
    """Makes a model return something else for packed batches, whose masks are int32. Reading it raises an error."""

    def as_tuple(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        return output.to_tuple() if kwargs["attention_mask"].dtype == torch.int32 else output

    model.model.register_forward_hook(as_tuple, with_kwargs=True)


AGREED: dict[str, Callable[[PreTrainedModel], None]] = {
    "head-hooks": hook_head,
    "head-forward": replace_forward_of_head,
    "written-buffers": count_in_a_buffer,
    "cannot-run": fail_packed,
}
"""By the name of the reason, a change of a model for which all ranks fall back."""
