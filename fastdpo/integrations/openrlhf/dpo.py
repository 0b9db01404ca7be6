"""OpenRLHF's DPOTrainer, patched where it scores a batch, in `concatenated_forward`.

`Actor.forward` is not patched, since PPO and SFT use it, too. OpenRLHF stores logits and their
float32 copy for every token of prompts and answers. Here, no padding is computed, whether or not
`packing_samples` is set, and only answers are scored.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without OpenRLHF.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.batch import inputs_once
from ...models.examine.support import wrapping_reason
from ...models.parts import base_of
from ...models.state import ForwardOptions
from ...packing import IGNORE_INDEX
from ..scored_rows import Inputs, ScoredRows
from .line import OpenRLHFLine

if TYPE_CHECKING:
    from openrlhf.models import Actor
    from openrlhf.trainer.dpo_trainer import DPOTrainer

Results = tuple[Tensor, Tensor, Any, Tensor]
"""The return value of OpenRLHF: log-probabilities of chosen and rejected answers
[B], router loss, loss of chosen answers.
"""

_PARAMETERS = {
    "concatenated_inputs": ["self", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens", "..."],
    "_get_batch_logps": ["self", "per_token_logps", "attention_mask", "prompt_id_lens", "..."],
}
_SCORES = (
    *("concatenated_forward", "_get_batch_logps", "openrlhf.models.actor:Actor.forward"),
    "openrlhf.models.actor:log_probs_from_logits",
)


class OpenRLHFDPOLine(OpenRLHFLine):
    parameters = _PARAMETERS
    relies_on = _SCORES

    def request(self, trainer: DPOTrainer, role: str) -> ForwardOptions:
        actor = trainer.model if role == "policy" else trainer.ref_model
        return super().request(trainer, role)._replace(temperature=actor.temperature)

    def concatenated_forward(
        self,
        stock: Callable,
        trainer: DPOTrainer,
        model: Actor,
        chosen_ids: Tensor,
        c_mask: Tensor,
        reject_ids: Tensor,
        r_mask: Tensor,
        prompt_id_lens: list[int],
    ) -> Results:
        batch = (chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens)
        if not self.fuses(trainer, model):
            return stock(trainer, model, *batch)
        # Policy and reference get the same batch, and so one layout.
        rows = inputs_once(self.state_of(trainer), batch[:-1], lambda: rows_of(trainer, *batch))
        return score(trainer, model, rows, prompt_id_lens)


def rows_of(trainer: DPOTrainer, *batch: Any) -> Inputs:
    """The rows of a batch, given as the arguments of `concatenated_forward`."""
    ids, mask, _ = trainer.concatenated_inputs(*batch)
    return {"input_ids": ids, "attention_mask": mask, "labels": answer_labels(ids, mask, batch[-1])}


def score(trainer: DPOTrainer, actor: Actor, rows: Inputs, prompt_lengths: list[int]) -> Results:
    """What `concatenated_forward` returns for these rows, from one call of the actor's model."""
    inputs = {**rows, "use_cache": False}
    config = base_of(actor, "openrlhf").config
    if hasattr(config, "output_router_logits"):  # the actor sets it, whether it is needed or not
        inputs["output_router_logits"] = trainer.aux_loss
    output = actor.model(**inputs, fused_lm_head=wrapping_reason(actor.model) or True)
    if isinstance(output, ScoredRows):
        sums, aux_loss = output.sums(), output.aux_loss
        means = sums / output.counts()
    else:  # logits: the call has fallen back
        from openrlhf.models.utils import log_probs_from_logits

        logits = output["logits"].float() / actor.temperature
        logps = log_probs_from_logits(logits, rows["input_ids"].roll(-1, 1))[:, :-1]
        sums, means = trainer._get_batch_logps(logps, rows["attention_mask"], prompt_lengths * 2)
        aux_loss = output.get("aux_loss")
    chosen, rejected = sums.chunk(2)
    return chosen, rejected, [] if aux_loss is None else aux_loss, -means[: len(chosen)].mean()


def answer_labels(ids: Tensor, mask: Tensor, prompt_lengths: list[int] | Tensor) -> Tensor:
    """The labels of a batch of pairs: the real tokens of chosen and of rejected answers.

    Each row is masked by the length of the tokenized prompt, not by the tokens that the two rows
    have in common: a tokenizer may merge the end of a prompt with the beginning of an answer.

    Args:
        ids: [2B, L], chosen rows first, padded on the right.
        mask: [2B, L], 0 at padding.
        prompt_lengths: number of tokens of each of the B prompts.

    Returns:
        int64 [2B, L], `IGNORE_INDEX` where a token is not scored.
    """
    lengths = torch.as_tensor(prompt_lengths, device=ids.device).flatten()
    in_prompt = torch.arange(ids.shape[1], device=ids.device) < lengths.repeat(2)[:, None]
    return ids.masked_fill(in_prompt | (mask == 0), IGNORE_INDEX)
