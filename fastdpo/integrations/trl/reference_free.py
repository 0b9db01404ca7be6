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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models import forward
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..line import TrainerLine
from ..scored_rows import Inputs, ScoredRows, label_mask, masked_mean
from .models import models_of

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "batch"],
    "concatenated_inputs": ["batch", "is_encoder_decoder", "padding_value", "device"],
    "get_batch_loss_metrics": ["self", "model", "batch", "train_eval"],
}


class LossInputs(NamedTuple):
    """What a trainer's loss is computed from.

    Attributes:
        padding: the token id of padding.
        averages: whether the log-probability of a row is the mean over its completion, not the sum.
        nll: the tokens of the chosen rows whose negative log-likelihood is part of the loss.
    """

    padding: int
    averages: bool
    nll: str  # "none", "completion" or "row"


class ReferenceFreeLine(TrainerLine):
    """The line of one of the two trainers."""

    parameters = _PARAMETERS
    path = ("get_batch_loss_metrics", "concatenated_forward")

    def loss_inputs(self, trainer: Any) -> LossInputs:
        raise NotImplementedError

    def models(self, trainer: Any) -> dict[str, nn.Module]:
        return models_of(trainer)

    def statistics(self, trainer: Any) -> tuple[str, ...]:
        return ("mean_logits",)

    def replace(self) -> None:
        self.wrap("concatenated_forward", self.concatenated_forward)

    def concatenated_forward(self, stock: Callable, trainer: Any, model: Any, batch: dict[str, Any]) -> Any:
        if not self.calls(trainer, model):
            return stock(trainer, model, batch)
        if trainer.is_encoder_decoder:
            forward.record_fallback(model, self.name, Reason("encoder-decoder", model="the model"))
            return stock(trainer, model, batch)
        loss_inputs = self.loss_inputs(trainer)
        rows = _rows(trainer, batch, loss_inputs.padding)
        completions = label_mask(rows["labels"])

        def from_logits(of_model: Any) -> tuple[Tensor, ...]:
            chosen, rejected, *logits_and_others = stock(trainer, of_model, batch)
            mean_logits = torch.cat(
                [x[:, : completions.shape[1]].mean(-1, dtype=torch.float32) for x in logits_and_others[:2]]
            )
            return chosen, rejected, *_mean_logits(mean_logits, completions), *logits_and_others[2:]

        results = functools.partial(_results, loss_inputs, completions)
        return self.score(model, _inputs(trainer, rows, loss_inputs), results, from_logits)


class CPOLine(ReferenceFreeLine):
    """Also for SimPO."""

    def loss_inputs(self, trainer: Any) -> LossInputs:
        nll = "completion" if trainer.cpo_alpha != 0 else "none"
        return LossInputs(padding=trainer.pad_token_id, averages=trainer.loss_type in ("ipo", "simpo"), nll=nll)


class ORPOLine(ReferenceFreeLine):
    def loss_inputs(self, trainer: Any) -> LossInputs:
        return LossInputs(padding=trainer.padding_value, averages=True, nll="row")


def _rows(trainer: Any, batch: dict[str, Any], padding: int) -> dict[str, Tensor]:
    """Ids, mask and labels [2B, L], chosen rows first. Labels are the tokens of the completions."""
    whole = trainer.concatenated_inputs(batch, padding_value=padding, device=trainer.accelerator.device)
    return {name: whole[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels")}


def _inputs(trainer: Any, rows: dict[str, Tensor], loss_inputs: LossInputs) -> Inputs:
    inputs: Inputs = {**rows, "use_cache": False}
    if loss_inputs.nll == "row":
        n = len(rows["labels"]) // 2
        chosen = rows["input_ids"][:n].masked_fill(rows["attention_mask"][:n] == 0, IGNORE_INDEX)
        inputs["labels"] = torch.cat([chosen, rows["labels"][n:]])
    if trainer.aux_loss_enabled:
        inputs["output_router_logits"] = True
    return inputs


def _results(loss_inputs: LossInputs, completions: Tensor, rows: ScoredRows) -> tuple[Tensor, ...]:
    """The return value of TRL, with means in the place of logits.

    `completions` are the tokens of the completions, bool [2B, L-1].
    """
    scored = rows.within(completions)
    chosen, rejected = (scored.means() if loss_inputs.averages else scored.sums()).chunk(2)
    nll = rows.halves()[0].nll() if loss_inputs.nll != "none" else torch.tensor(0.0, device=chosen.device)
    means = (half.mean_logit() for half in scored.halves())
    return chosen, rejected, *means, nll, *(() if rows.aux_loss is None else (rows.aux_loss,))


def _mean_logits(mean_logits: Tensor, completions: Tensor) -> tuple[Tensor, ...]:
    """The means over the completions of the chosen and of the rejected rows, from those of tokens [2B, L-1]."""
    halves = zip(mean_logits.chunk(2), completions.to(mean_logits.device).chunk(2), strict=True)
    return tuple(masked_mean(logits, mask) for logits, mask in halves)
