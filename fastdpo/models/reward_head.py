"""Reward models: a causal LM's backbone with a linear layer of one label, `score`, in the place of the LM head.

transformers' sequence classifiers compute the label of every token and keep that of each row's last
one. Here only that one is computed. Every call of such a model is a fused call; which token it scores
is passed on as a label of that position, `shift_labels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..packing import IGNORE_INDEX
from ..reasons import Reason
from .language_model import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED_ARGUMENTS = ("margin",)
"""Arguments that TRL gives a reward model, columns of the batch. The modules of the model ignore them."""


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The layer of labels, which PEFT may have wrapped."""
    return getattr(model, "score", None)


def unsupported_reason(model: PreTrainedModel) -> Reason | None:
    """Returns why a model is not a reward model of the usual form, or None if it is."""
    head = head_of(model)
    if head is None:
        return Reason("no-score", model=type(model).__name__)
    if model.config.num_labels != 1:
        return Reason("several-labels", labels=model.config.num_labels)
    return None


def with_scored_tokens(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with `labels_of` its rows. Nothing is added to a call that is given labels, or
    which the model refuses.
    """
    labels = labels_of(kwargs.get("input_ids"), text_config(model).pad_token_id)
    return kwargs if labels is None or kwargs.get("labels") is not None else {**kwargs, "shift_labels": labels}


def labels_of(ids: Any, padding: int | None) -> Tensor | None:
    """A label at the token of each row whose score its model returns, and `IGNORE_INDEX` elsewhere, [R, L] as the ids.

    As in transformers, that is the last one whose id is not the padding's, whatever the attention mask
    says, or the last position for a single row without a padding id. None if the model refuses the ids.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0 or (padding is None and len(ids) != 1):
        return None
    position = torch.arange(ids.shape[1], device=ids.device)
    last = position[-1:].expand(len(ids)) if padding is None else (position * (ids != padding)).argmax(1)
    return torch.full_like(ids, IGNORE_INDEX).scatter_(1, last[:, None], 0)


def scores(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The score of each hidden state, [N, D] to [N]."""
    head: Any = head_of(model)
    return head(hidden).squeeze(-1)
