"""TRL's A2POTrainer, patched where it sums the log-probabilities of completions, in `_get_sequence_logps`.

TRL stores the logits of completions, and a softmax over them, for policy and reference. Here only their real tokens are
scored, and rows share what they begin with. Generation and rewards are not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...models.batch import inputs_once
from ...packing import IGNORE_INDEX
from ..line import TrainerLine
from ..scored_rows import Inputs, ScoredRows, score


class A2POLine(TrainerLine):
    relies_on = ("_get_sequence_logps",)
    replaced = ("_get_sequence_logps",)

    def _get_sequence_logps(
        self, stock: Callable, trainer: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
    ) -> Tensor:
        batch = input_ids, attention_mask, logits_to_keep
        if not self.fuses(trainer, model):
            return stock(trainer, model, *batch)
        # Policy and reference get the same batch, and so one layout.
        make = functools.partial(inputs_of, trainer, *batch)
        inputs = inputs_once(self.state_of(trainer), batch[:2], make)
        return score(model, self.name, inputs, ScoredRows.sums, lambda called: stock(trainer, called, *batch))


def inputs_of(trainer: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int) -> Inputs:
    """Rows whose labels are the real tokens of the completions, and what TRL gives a call that falls back."""
    labels = input_ids.masked_fill(attention_mask == 0, IGNORE_INDEX)
    labels[:, :-logits_to_keep] = IGNORE_INDEX
    inputs: Inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return inputs | ({"logits_to_keep": logits_to_keep + 1} if "logits_to_keep" in trainer.model_kwarg_keys else {})
