"""Reasons to fall back that one rank alone has. None of them changes what a model computes.

`OF_CALLS` change the arguments of a call, `AROUND_CALLS` what surrounds it, `AGREED` a model before it is
trained.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import PreTrainedModel

from tests.support.models.watching import change, watch

Arguments = tuple[tuple, dict[str, Any]]
POSITIONAL = "positional-arguments"


def positions_from_one(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Rotary embeddings see differences of positions only."""
    return dict(position_ids=torch.arange(1, ids.shape[1] + 1)[None])


def whole_mask(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    return dict(attention_mask=causal & (mask[:, None, None] != 0))


def labels_at_padding(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """The mask ends two tokens before the rows, which are padded on the right."""
    return dict(attention_mask=mask * (mask.flip(1).cumsum(1).flip(1) > 2))


OF_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]] = {
    POSITIONAL: lambda ids, mask: {},
    "no-input-ids": lambda ids, mask: dict(attention_mask=None),  # rows are padded on the right, which none sees
    "unsupported-argument": lambda ids, mask: dict(output_hidden_states=0),
    "positions": positions_from_one,
    "batch-form": whole_mask,
    "text-model": lambda ids, mask: dict(mm_token_type_ids=torch.zeros_like(ids)),
    "mask-holes": lambda ids, mask: dict(attention_mask=mask.index_fill(1, torch.tensor(1), 0)),
    "label-at-padding": labels_at_padding,
    "no-tokens": lambda ids, mask: dict(attention_mask=torch.zeros_like(mask), labels=torch.full_like(ids, -100)),
}
"""By the name of the reason, what replaces arguments of a call, from its ids and its mask [R, L]."""


def change_each_call(model: PreTrainedModel) -> None:
    """Gives each call of a model another reason, in the order of `OF_CALLS`."""
    reasons = itertools.cycle(OF_CALLS)

    def change(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        reason = next(reasons)
        given = kwargs | OF_CALLS[reason](kwargs["input_ids"], kwargs["attention_mask"])
        return ((given.pop("input_ids"),) if reason == POSITIONAL else ()), given

    model.register_forward_pre_hook(change, with_kwargs=True)


def change_types(model: PreTrainedModel) -> None:
    """All rows have the same types of tokens, which are given once."""

    def change(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        return args, dict(kwargs, mm_token_type_ids=torch.zeros_like(kwargs["input_ids"][:1]))

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
