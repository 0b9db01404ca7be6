"""Reward models: a causal LM's backbone with a linear layer of one label, in the place of the LM head.

Such models compute the label of every token and keep that of each row's last one. Here only that one is
computed. Which token it is is passed on as a label of that position, `shift_labels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..packing import IGNORE_INDEX
from ..reasons import Reason
from .parts import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


OUTPUTS = ("output_hidden_states", "output_attentions")
"""Entries of a configuration with which a model returns more than a fused call does."""


class RewardHead:
    """How a reward model scores rows. This class describes transformers' sequence classifiers, and subclasses
    describe other models.

    Attributes:
        scored: what the model computes of rows, in words.
        every_call: whether all calls of the model are fused, or only those with `fused_lm_head=True`.
        ignored: arguments of a call that do not change its scores.
        own_arguments: those with which the model's own forward returns what `returned` takes.
        runs_padded: whether the backbone, given the arguments of a padded call, computes what the model's own
            forward does.
    """

    scored: ClassVar[str] = "rewards"
    every_call: ClassVar[bool] = True
    ignored: ClassVar[tuple[str, ...]] = ("margin",)  # a column of TRL's batches
    own_arguments: ClassVar[Mapping[str, bool]] = MappingProxyType({"use_cache": False})
    runs_padded: ClassVar[bool] = True

    def module_of(self, model: PreTrainedModel) -> nn.Module | None:
        """The layer of labels, which PEFT may have wrapped."""
        return getattr(model, "score", None)

    def unsupported_reason(self, model: PreTrainedModel) -> Reason | None:
        """Returns why a model is not a reward model of this form, or None if it is."""
        if self.module_of(model) is None:
            return Reason("no-score", model=type(model).__name__)
        if model.config.num_labels != 1:
            return Reason("several-labels", labels=model.config.num_labels)
        return None

    def unsupported_call_reason(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> Reason | None:
        """Returns that a call asks for more than scores, or None if it does not."""
        names = ("labels", "use_cache") if self.every_call else ("labels",)
        given = [name for name in names if kwargs.get(name) is not None and kwargs[name] is not False]
        if given:
            return Reason("unsupported-argument", names=", ".join(given))
        configs = (model.config, text_config(model)) if self.every_call else ()
        entries = [x for x in OUTPUTS if kwargs.get(x) is None and any(getattr(each, x, False) for each in configs)]
        return Reason("configured-outputs", names=", ".join(entries)) if entries else None

    def labels_of(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> Tensor | None:
        """A label at the token of each row whose score the model returns, and `IGNORE_INDEX` elsewhere, [R, L] as the
        ids of a call. None if the model refuses the ids.
        """
        return labels_of(kwargs.get("input_ids"), text_config(model).pad_token_id)

    def with_scored_tokens(self, model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, with `labels_of` its rows. Nothing is added to a call that is given labels, or
        which the model refuses.
        """
        labels = self.labels_of(model, kwargs)
        return kwargs if labels is None or kwargs.get("labels") is not None else {**kwargs, "shift_labels": labels}

    def scores(self, model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """The score of each hidden state, [N, D] to [N]."""
        head: Any = self.module_of(model)
        return head(hidden).squeeze(-1)

    def returned(self, output: Any, is_scored: Tensor) -> Tensor:
        """The scores [R, 1] in the output of the model's own forward. `is_scored` is a mask of the tokens, [R, L]."""
        return output[0] if isinstance(output, tuple) else output.logits

    def make_output(self, scored: Any, kwargs: dict[str, Any]) -> object:
        """The output of a fused call, from its `state.ScoredBatch` (see `state.MakeOutput`)."""
        from transformers.modeling_outputs import SequenceClassifierOutputWithPast

        logits: Any = scored.logps.logps
        output = SequenceClassifierOutputWithPast(logits=logits)
        return output.to_tuple() if kwargs.get("return_dict") is False else output


CLASSIFIER_HEAD = RewardHead()


def labels_of(ids: Any, padding: int | None) -> Tensor | None:
    """`RewardHead.labels_of` for ids and the id of padding.

    As in transformers, the token is the last one whose id is not the padding's, whatever the attention mask
    says, or the last position for a single row without a padding id.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0 or (padding is None and len(ids) != 1):
        return None
    position = torch.arange(ids.shape[1], device=ids.device)
    last = position[-1:].expand(len(ids)) if padding is None else (position * (ids != padding)).argmax(1)
    return labels_at(ids, last)


def labels_at(ids: Tensor, positions: Tensor) -> Tensor:
    """A label at one position of each row [R], and `IGNORE_INDEX` elsewhere, [R, L] as the ids."""
    return torch.full_like(ids, IGNORE_INDEX).scatter_(1, positions[:, None], 0)
