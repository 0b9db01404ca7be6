"""Reasons to fall back that one rank alone has. None of them changes what a model computes.

`OF_CALLS` change the arguments of a call, `AROUND_CALLS` what surrounds it, `AGREED` a model before it is
trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import PreTrainedModel

from tests.support.models.watching import change, watch

Arguments = tuple[tuple, dict[str, Any]]


def positional(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Arguments:
    return (ids,), kwargs


def without_mask(model: PreTrainedModel, ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Arguments:
    """Rows are padded on the right, so no token that is scored sees padding."""
    return (), dict(kwargs, input_ids=ids)


def without_hidden_states(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Arguments:
    return (), dict(kwargs, input_ids=ids, output_hidden_states=0)


def positions_from_one(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Arguments:
    """Rotary embeddings see differences of positions only."""
    return (), dict(kwargs, input_ids=ids, position_ids=torch.arange(1, ids.shape[1] + 1)[None])


def whole_mask(model: PreTrainedModel, ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Arguments:
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    return (), dict(kwargs, input_ids=ids, attention_mask=causal & (attention_mask[:, None, None] != 0))


def types_of_tokens(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Arguments:
    return (), dict(kwargs, input_ids=ids, mm_token_type_ids=torch.zeros_like(ids))


def hole(model: PreTrainedModel, ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Arguments:
    return (), dict(kwargs, input_ids=ids, attention_mask=attention_mask.index_fill(1, torch.tensor(1), 0))


def labels_at_padding(
    model: PreTrainedModel, ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any
) -> Arguments:
    """The mask ends two tokens before the rows, which are padded on the right."""
    from_the_end = attention_mask.flip(1).cumsum(1).flip(1)
    return (), dict(kwargs, input_ids=ids, attention_mask=attention_mask * (from_the_end > 2))


def nothing_real(model: PreTrainedModel, ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Arguments:
    labels = torch.full_like(kwargs.pop("labels"), -100)
    return (), dict(kwargs, input_ids=ids, attention_mask=torch.zeros_like(attention_mask), labels=labels)


OF_CALLS: dict[str, Callable[..., Arguments]] = {
    "positional-arguments": positional,
    "no-input-ids": without_mask,
    "unsupported-argument": without_hidden_states,
    "positions": positions_from_one,
    "batch-form": whole_mask,
    "text-model": types_of_tokens,
    "mask-holes": hole,
    "label-at-padding": labels_at_padding,
    "no-tokens": nothing_real,
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


def types_of_one_row(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Arguments:
    """All rows have the same types of tokens, which are given once."""
    return (), dict(kwargs, input_ids=ids, mm_token_type_ids=torch.zeros_like(ids[:1]))


def change_types(model: PreTrainedModel) -> None:
    def change(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        kwargs = dict(kwargs)
        return types_of_one_row(model, kwargs.pop("input_ids"), **kwargs)

    model.register_forward_pre_hook(change, with_kwargs=True)


def add_images(model: PreTrainedModel) -> None:
    """Gives each call an image in its first chosen and its first rejected row, in place of their first tokens."""
    config = model.config
    side = config.vision_config.image_size
    placeholders = (side // config.vision_config.patch_size) ** 2

    def change(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        ids = kwargs["input_ids"].masked_fill(kwargs["input_ids"] == config.image_token_id, 0)
        ids[[0, len(ids) // 2], :placeholders] = config.image_token_id
        return args, dict(kwargs, input_ids=ids, pixel_values=torch.ones(2, 3, side, side))

    model.register_forward_pre_hook(change, with_kwargs=True)


def add_noise_to_embeddings(model: PreTrainedModel) -> None:
    """Sets the attribute that stands for NEFTune, without its noise."""
    model.get_input_embeddings().neftune_noise_alpha = 1e-3


def split_sequences(model: PreTrainedModel) -> None:
    """During each call, accelerate is configured for context parallelism. Nothing reads that then but fastdpo."""
    state = AcceleratorState._shared_state
    kept: list[Any] = []

    def begin(module: nn.Module, args: tuple) -> None:
        kept.append(state.get("parallelism_config"))
        state["parallelism_config"] = SimpleNamespace(cp_enabled=True, sp_enabled=False)

    def end(module: nn.Module, args: tuple, output: Any) -> None:
        state["parallelism_config"] = kept.pop()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


AROUND_CALLS: dict[str, Callable[[PreTrainedModel], None]] = {"neftune": add_noise_to_embeddings}
"""By the name of the reason, a change of a model or of its surroundings which is a reason of each training call."""


class OwnLinear(nn.Linear):
    """A class of heads of its own."""


def change_class_of_head(model: PreTrainedModel) -> None:
    model.get_output_embeddings().__class__ = OwnLinear


def hook_head(model: PreTrainedModel) -> None:
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: None)


def replace_forward_of_head(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    head.forward = functools.partial(nn.Linear.forward, head)


def count_in_a_buffer(model: PreTrainedModel) -> None:
    norm = model.model.norm
    norm.register_buffer("calls", torch.zeros(()))
    watch(norm, lambda *_: norm.calls.add_(1))


def drop_attention(model: PreTrainedModel) -> None:
    """Sets a probability of dropout that no random number is below."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-12


def fail_packed(model: PreTrainedModel) -> None:
    """Makes a model return something else for packed batches, whose masks are int32. Reading it raises an error."""

    def as_tuple(output: Any, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        return output.to_tuple() if attention_mask.dtype == torch.int32 else output

    change(model.model, as_tuple)


def watch_gradients(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_full_backward_hook(lambda module, given, gradients: None)


AGREED: dict[str, Callable[[PreTrainedModel], None]] = {
    "head-type": change_class_of_head,
    "split-sequences": split_sequences,
    "head-hooks": hook_head,
    "head-forward": replace_forward_of_head,
    "keeps-state": count_in_a_buffer,
    "user-hooks": watch_gradients,
    "cannot-run": fail_packed,
}
"""By the name of the reason, a change of a model for which all ranks fall back."""
