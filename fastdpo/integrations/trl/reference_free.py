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
import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models import forward
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..concatenated import Inputs, install, score
from ..protocol import STATE, PatchOptions
from ..replacements import Replacements
from ..signatures import first_difference
from .created_trainers import CreatedTrainers, TrainerState
from .models import new_models

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "batch"],
    "concatenated_inputs": ["batch", "is_encoder_decoder", "padding_value", "device"],
    "get_batch_loss_metrics": ["self", "model", "batch", "train_eval"],
    "create_accelerator_and_postprocess": ["self"],
}
_PATH = ("get_batch_loss_metrics", "concatenated_forward")


@dataclass(eq=False, kw_only=True)
class _ReferenceFreeState(TrainerState):
    models: weakref.WeakSet = field(default_factory=weakref.WeakSet)


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


class ReferenceFreeLine:
    """The four functions of a trainer line (`protocol.TrainerLine`).

    Args:
        integration: name of the trainer, such as "trl.CPOTrainer".
        module: of TRL, which defines the trainer's class.
        loss_inputs: reads a trainer's `LossInputs`.
    """

    def __init__(self, integration: str, module: str, loss_inputs: Callable[[Any], LossInputs]):
        self._integration, self._module, self._loss_inputs = integration, module, loss_inputs
        self._replacements = Replacements()
        self._trainers = CreatedTrainers(integration, _PATH)

    def trainer_class(self) -> type:
        return getattr(importlib.import_module(self._module), self._integration.rpartition(".")[2])

    def unsupported_reason(self) -> Reason | None:
        """Returns how TRL differs from the versions that this module was tested with, or None."""
        return first_difference(self.trainer_class(), _PARAMETERS)

    def enable(self, options: PatchOptions) -> None:
        trainer: Any = self.trainer_class()
        stock_forward = trainer.concatenated_forward

        def prepare(trainer: Any) -> None:
            state = vars(trainer).get(STATE)
            if state is not None:
                models = new_models(trainer, state.models)
                install(models, self._integration, options, statistics=("mean_logits",))

        @functools.wraps(stock_forward)
        def concatenated_forward(trainer, model, batch):
            if vars(trainer).get(STATE) is None or not forward.is_installed(model, self._integration):
                return stock_forward(trainer, model, batch)
            if trainer.is_encoder_decoder:
                forward.record_fallback(model, self._integration, Reason("encoder-decoder", model="the model"))
                return stock_forward(trainer, model, batch)
            loss_inputs = self._loss_inputs(trainer)
            rows = _rows(trainer, batch, loss_inputs.padding)

            def stock(of_model: Any) -> tuple[Tensor, ...]:
                chosen, rejected, *logits_and_others = stock_forward(trainer, of_model, batch)
                mean_logits = torch.cat([x.mean(-1, dtype=torch.float32) for x in logits_and_others[:2]])
                return chosen, rejected, *_mean_logits(mean_logits, rows["labels"]), *logits_and_others[2:]

            results = functools.partial(_results, loss_inputs, rows["labels"])
            return score(model, self._integration, _inputs(trainer, rows, loss_inputs), results, stock)

        self._trainers.watch(self._replacements, trainer, new_state=_ReferenceFreeState, prepare=prepare)
        self._replacements.put(trainer, "concatenated_forward", concatenated_forward)

    def disable(self) -> None:
        self._replacements.undo()
        self._trainers.discard_states()


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


def _results(loss_inputs: LossInputs, labels: Tensor, inputs: Inputs, output: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The return value of TRL, with means in the place of logits."""
    logps = output["log_probs"]  # [2B, L-1]
    n = len(logps) // 2
    scored = (labels[:, 1:] != IGNORE_INDEX).to(logps.device)
    sums = (logps * scored).sum(1)
    if loss_inputs.averages:
        sums = sums / scored.sum(1)
    nll = torch.tensor(0.0, device=logps.device)
    if loss_inputs.nll != "none":
        nll = -logps[:n].sum() / (inputs["labels"][:n, 1:] != IGNORE_INDEX).sum().to(logps.device)
    others = (output["aux_loss"],) if "aux_loss" in output else ()
    return sums[:n], sums[n:], *_mean_logits(output["mean_logits"], labels), nll, *others


def _mean_logits(mean_logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Means over the completions of the chosen and of the rejected rows.

    Args:
        mean_logits: [2B, L-1] or, with the last position, [2B, L].
        labels: [2B, L].
    """
    scored = (labels[:, 1:] != IGNORE_INDEX).to(mean_logits.device)
    halves = zip((mean_logits[:, : scored.shape[1]] * scored).chunk(2), scored.chunk(2), strict=True)
    chosen, rejected = (values.sum() / of.sum() for values, of in halves)
    return chosen, rejected
