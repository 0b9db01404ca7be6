"""The batches of OpenRLHF's DPOTrainer, and what it computes from them."""

# pyright: reportMissingImports=false
# Types are checked in an environment without OpenRLHF.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.parts import base_of
from ...packing import IGNORE_INDEX
from ..scored_rows import Inputs, ScoredRows

if TYPE_CHECKING:
    from openrlhf.models import Actor
    from openrlhf.trainer.dpo_trainer import DPOTrainer


Results = tuple[Tensor, Tensor, Any, Tensor]
"""The return value of OpenRLHF: log-probabilities of chosen and rejected answers
[B], router loss, loss of chosen answers.
"""


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
    output = actor.model(**inputs, fused_lm_head=True)
    if isinstance(output, ScoredRows):
        sums, means, aux_loss = output.sums(), output.means(), output.aux_loss
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

    Raises:
        ValueError: the number of lengths is not B.
    """
    lengths = torch.as_tensor(prompt_lengths, device=ids.device).flatten()
    if 2 * len(lengths) != len(ids):
        raise ValueError(
            f"answer_labels: prompt_lengths must have one entry for each of {len(ids) // 2} pairs; got {len(lengths)}"
        )
    in_prompt = torch.arange(ids.shape[1], device=ids.device) < lengths.repeat(2)[:, None]
    return ids.masked_fill(in_prompt | (mask == 0), IGNORE_INDEX)
