"""TRL's trainers without a reference, CPO (and SimPO) and ORPO, patched where they score a batch, in
`concatenated_forward`.

TRL stores the logits of all positions. Here the completions of a pair share their prompt, and only
tokens that the loss needs are scored: those of the completions, and in ORPO also the prompt of the
chosen row.

Loss, gradients, rewards and log-probabilities equal those of TRL. `logits/chosen` and
`logits/rejected` are means over the tokens of the completions, as in TRL's DPOTrainer, whether a
batch is fused or falls back. These two trainers of TRL average over prompts and padding as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...models import forward
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..line import TrainerLine
from ..scored_rows import Inputs, ScoredRows, label_mask, masked_mean, score


class ReferenceFreeLine(TrainerLine):
    """The line of one of the two trainers."""

    parameters = MappingProxyType({"concatenated_inputs": ["batch", "is_encoder_decoder", "padding_value", "device"]})
    relies_on = ("concatenated_forward", "get_batch_logps", "get_batch_loss_metrics")
    replaced = ("concatenated_forward",)
    logged = ("mean_logits",)

    def concatenated_forward(self, stock: Callable, trainer: Any, model: Any, batch: dict[str, Any]) -> Any:
        if not self.fuses(trainer, model):
            return stock(trainer, model, batch)
        if trainer.is_encoder_decoder:
            forward.record_fallback(model, self.name, Reason("encoder-decoder", model="the model"))
            return stock(trainer, model, batch)
        rows = self._rows(trainer, batch)
        completions = label_mask(rows["labels"])

        def from_logits(of_model: Any) -> tuple[Tensor, ...]:
            chosen, rejected, *logits_and_others = stock(trainer, of_model, batch)
            halves = zip(logits_and_others[:2], completions.chunk(2), strict=True)
            means = (_mean_logit(logits, mask) for logits, mask in halves)
            return chosen, rejected, *means, *logits_and_others[2:]

        results = functools.partial(results_of, self, trainer, completions)
        return score(model, self.name, self._inputs(trainer, rows), results, from_logits)

    def _rows(self, trainer: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Ids, mask and labels [2B, L], chosen rows first. Labels are the tokens of the completions."""
        padding = trainer.padding_value if is_orpo(self) else trainer.pad_token_id
        whole = trainer.concatenated_inputs(batch, padding_value=padding, device=trainer.accelerator.device)
        return {name: whole[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels")}

    def _inputs(self, trainer: Any, rows: dict[str, Tensor]) -> Inputs:
        inputs: Inputs = {**rows, "use_cache": False}
        if is_orpo(self):  # whose loss has the negative log-likelihood of the prompts of chosen rows, too
            n = len(rows["labels"]) // 2
            chosen = rows["input_ids"][:n].masked_fill(rows["attention_mask"][:n] == 0, IGNORE_INDEX)
            inputs["labels"] = torch.cat([chosen, rows["labels"][n:]])
        if trainer.aux_loss_enabled:
            inputs["output_router_logits"] = True
        return inputs


def is_orpo(line: TrainerLine) -> bool:
    """Whether a line is of an ORPOTrainer, which has one loss. A CPOTrainer has several."""
    return line.name.endswith(".ORPOTrainer")


def results_of(line: TrainerLine, trainer: Any, completions: Tensor, rows: ScoredRows) -> tuple[Tensor, ...]:
    """What `concatenated_forward` returns, with the means of the logits in place of the logits.

    `completions` are the tokens of the completions, bool [2B, L-1].
    """
    scored = rows.within(completions)
    averages = is_orpo(line) or trainer.loss_type in ("ipo", "simpo")
    logps = scored.sums() / scored.counts() if averages else scored.sums()
    without_nll = getattr(trainer, "cpo_alpha", None) == 0
    nll = torch.tensor(0.0, device=logps.device) if without_nll else rows.halves()[0].nll()
    means = (half.mean_logit() for half in scored.halves())
    return *logps.chunk(2), *means, nll, *(() if rows.aux_loss is None else (rows.aux_loss,))


def _mean_logit(logits: Tensor, completions: Tensor) -> Tensor:
    """The mean of the logits [B, L, V] of rows with these tokens of completions, bool [B, L-1]."""
    means = logits[:, : completions.shape[1]].mean(-1, dtype=torch.float32)
    return masked_mean(means, completions.to(means.device))
