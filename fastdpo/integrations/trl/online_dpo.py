"""TRL's OnlineDPOTrainer, patched where it scores completions, in `_forward`.

TRL stores a softmax over the vocabulary at each position, padding included, for policy and
reference. Here the two completions of a prompt share it, and only their tokens are scored.

Loss, gradients, rewards and log-probabilities equal those of TRL. Four metrics differ if
completions have different lengths: `objective/kl`, `objective/entropy`,
`objective/non_score_reward` and `objective/rlhf_reward`. TRL also sums them over the padding after
the end of a completion. Here they are sums over its tokens, whether a batch is fused or falls back.
TRL masks the padding in its loss, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.batch import inputs_once
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..line import TrainerLine
from ..scored_rows import Inputs, ScoredRows, score
from .gathering import of_all_ranks

if TYPE_CHECKING:
    from trl.experimental.online_dpo import OnlineDPOTrainer


class OnlineDPOLine(TrainerLine):
    relies_on = ("_forward",)
    replaced = ("_forward", "training_step")

    def training_step(
        self, stock: Callable, trainer: OnlineDPOTrainer, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        with of_all_ranks(trainer.accelerator):
            return stock(trainer, model, inputs, *args, **kwargs)

    def _forward(
        self,
        stock: Callable,
        trainer: OnlineDPOTrainer,
        model: Any,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        vision_inputs: Any = None,
    ) -> Tensor:
        inputs = (prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs)
        if not self.fuses(trainer, model):
            return stock(trainer, model, *inputs)

        def from_logits(called: Any) -> Tensor:
            return stock(trainer, called, *inputs).masked_fill(completion_mask == 0, 0)

        def results(rows: ScoredRows) -> Tensor:
            start = rows.logps.shape[1] - completion_ids.shape[1]
            return rows.logps[:, start:].to(completion_ids.device)

        if vision_inputs is not None:  # the call falls back, and the model logs why
            return from_logits(functools.partial(model, fused_lm_head=True))
        # Policy and reference get the same batch, and so one layout.
        tensors, make = inputs[:4], functools.partial(batch_of, trainer.max_length, *inputs[:4])
        batch = inputs_once(self.state_of(trainer), tensors, make)
        return score(model, self.name, batch, results, from_logits)


def batch_of(
    max_length: int, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
) -> Inputs | Reason:
    """Prompts, truncated on the left to `max_length` as in TRL, and completions, whose real tokens
    are the labels; or that nothing of the prompts is left. TRL then scores a token where it was seen.
    """
    cut = max(prompt_ids.shape[1] + completion_ids.shape[1] - max_length, 0)
    if cut >= prompt_ids.shape[1]:
        return Reason("truncated-prompt")
    prompt_ids, prompt_mask = prompt_ids[:, cut:], prompt_mask[:, cut:]
    targets = completion_ids.masked_fill(completion_mask == 0, IGNORE_INDEX)
    unscored = torch.full_like(prompt_ids, IGNORE_INDEX)
    return {
        "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
        "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1),
        "labels": torch.cat([unscored, targets], dim=1),
    }
