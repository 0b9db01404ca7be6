"""`patch(max_tokens=...)` for TRL's GRPOTrainer and RLOOTrainer: the rows of a step are cut by a budget of tokens.

TRL shuffles the completions of a generation before it cuts them into the batches that a step accumulates, and only
rows of one batch can share their prompt. Here the batches of a step are collected instead, as far as they come from
one generation. Their rows are cut anew, with those of a prompt together, and each micro-batch gets the weight in the
step that its rows have in TRL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ....batching.rows import RowPlanner
from ....logs import warn
from ....models.calls import outcomes
from ....models.layouts import SharePrompts
from ...bypass import bypass_reason, is_overridden
from ...callbacks import callback
from ...replacements import Replacements, temporarily
from .token_budget import shares_prompts, unsupported_processes_reason, without_sync

MEANS_OVER_ROWS = {"grpo", "sapo", "dr_grpo", "luspo"}
SUMS_OVER_A_GENERATION = {"dapo", "cispo", "vespo"}
"""The values of `loss_type` that are supported, by what divides a loss: its own rows and the number of batches that a
step accumulates, or the tokens of a generation.
"""

Scores = tuple[Tensor, Tensor, None]
"""Log-probabilities and entropies of completions, [R, W] each."""


class RowBudget:
    """Cuts the steps of one trainer.

    Args:
        name: of the trainer, such as "trl.GRPOTrainer".
        max_tokens, share_prompts: as in `patch`.
    """

    def __init__(self, name: str, max_tokens: int, share_prompts: SharePrompts):
        self._name, self._max_tokens = name, max_tokens
        self._share_prompts: SharePrompts = share_prompts
        self._batches: list[dict[str, Any]] = []  # of the step, not trained on yet
        self._position = 0  # in the step, of the next batch
        self._scored: list[Scores] | None = None  # by the micro-batches that were trained on, if any are
        self._known: Scores | None = None  # of the batch whose metrics are computed, if any are
        self._warned = False

    def install(self, trainer: Any) -> None:
        trainer.add_callback(callback(on_step_begin=self._start_step))

    def _start_step(self, *args: Any, **kwargs: Any) -> None:
        """Begins a step. A training that was stopped within one may have left batches."""
        self._batches, self._position = [], 0

    def training_step(self, trainer: Any, model: nn.Module, inputs: Any, train_on: Callable[[Any], Tensor]) -> Tensor:
        """Takes a batch of a step. The last one of a step or of a generation trains on all that were taken.

        Args:
            trainer: the trainer.
            model: the policy.
            inputs: what the trainer prepares the batch from.
            train_on: transformers' `training_step` for a batch, which returns its loss.

        Returns:
            The loss of all rows that were trained on, a scalar.
        """
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        self._batches.append(trainer._prepare_inputs(inputs))
        self._position += 1
        ends_step = self._position == trainer.current_gradient_accumulation_steps
        if not ends_step and (trainer._step + 1) % (trainer.args.steps_per_generation * trainer.num_iterations):
            return torch.zeros((), device=trainer.args.device)
        batches, self._batches = self._batches, []
        self._position *= not ends_step
        micro_batches = self._cut(trainer, batches)
        outcomes[self._name, "steps"] += ends_step
        outcomes[self._name, "micro-batches"] += len(micro_batches)
        self._scored = []
        prepared = Replacements()
        prepared.put(trainer, "_prepare_inputs", lambda batch: batch)  # micro-batches, which are made of prepared ones
        try:
            loss = self._train(trainer, model, batches, micro_batches, ends_step, train_on)
            self._log_metrics(trainer, model, batches, torch.cat(micro_batches))
        finally:
            self._scored = None
            prepared.undo()
        return loss

    def scores(self, score: Callable[[], Any]) -> Any:
        """The scores of a batch by TRL's own function: those that are known, if its metrics are computed."""
        if self._known is not None:
            return self._known
        scores = score()
        if self._scored is not None:
            self._scored.append((scores[0].detach(), scores[1].detach(), None))
        return scores

    def _cut(self, trainer: Any, batches: list[dict[str, Any]]) -> list[Tensor]:
        """The rows of each micro-batch, by their numbers in the joined batches."""
        device = trainer.accelerator.device
        prompts = torch.cat([x["prompt_ids"].masked_fill(x["prompt_mask"] == 0, -1) for x in batches])
        completions = torch.cat([x["completion_ids"].masked_fill(x["completion_mask"] == 0, -1) for x in batches])
        rows = [row[row >= 0] for row in torch.cat([prompts, completions], 1).cpu().numpy()]
        planner = RowPlanner(rows, share=shares_prompts(self._share_prompts, trainer.model))
        runs = planner.cut(self._max_tokens)
        largest = max(planner.tokens(*run) for run in runs)
        if largest > self._max_tokens and not self._warned:
            self._warned = True
            warn(f"{self._name}: a row has {largest} tokens, more than max_tokens={self._max_tokens}, and runs alone")
        if trainer.accelerator.num_processes > 1:  # each must run the model as often
            counts = trainer.accelerator.gather(torch.tensor([len(runs)], device=device))
            runs = planner.divided(runs, int(counts.max()))
        return [torch.tensor(planner.rows(run), device=device) for run in runs]

    def _train(
        self,
        trainer: Any,
        model: nn.Module,
        batches: list[dict[str, Any]],
        micro_batches: list[Tensor],
        ends_step: bool,
        train_on: Callable[[Any], Tensor],
    ) -> Tensor:
        loss = torch.zeros((), device=trainer.args.device)
        accumulated = trainer.current_gradient_accumulation_steps
        rows_of_step = accumulated * len(batches[0]["prompt_ids"])
        joined = {name: joined_entry(name, [x[name] for x in batches]) for name in batches[0]}
        is_mean = getattr(trainer, "loss_type", None) not in SUMS_OVER_A_GENERATION
        for i, rows in enumerate(micro_batches):
            batch = {name: x[rows] if x is not None and x.ndim else x for name, x in joined.items()}
            divisor = rows_of_step / len(rows) if is_mean else accumulated
            metrics = {"train": defaultdict(list)}  # left out: `_log_metrics` has those of TRL's batches
            with (
                temporarily(trainer, current_gradient_accumulation_steps=divisor, _metrics=metrics),
                nullcontext() if ends_step and i == len(micro_batches) - 1 else without_sync(trainer, model),
            ):
                loss = loss + train_on(batch)
        return loss

    def _log_metrics(self, trainer: Any, model: nn.Module, batches: list[dict[str, Any]], rows: Tensor) -> None:
        """Has TRL compute the metrics of its own batches, from the scores of the rows that were trained on."""
        places = rows.argsort()
        of_rows = (torch.cat(x)[places] for x in list(zip(*self._scored or (), strict=True))[:2])
        size = len(batches[0]["prompt_ids"])
        for batch, logps, entropies in zip(batches, *(x.split(size) for x in of_rows), strict=True):
            known = temporarily(self, _known=(logps, entropies, None))
            with known, torch.no_grad(), trainer.compute_loss_context_manager():
                trainer.compute_loss(model, batch)


def joined_entry(name: str, values: list[Any]) -> Tensor | None:
    """An entry of batches of one generation, in one tensor."""
    first = values[0]
    if first is None or (isinstance(first, Tensor) and first.ndim == 0):  # of the whole generation
        return first
    if not isinstance(first, Tensor) or name.startswith(("pixel", "image")):
        raise NotImplementedError(f"patch: max_tokens does not support batches with {name}, such as those with images")
    return torch.cat(values)


def unsupported_reason(trainer: Any, stock: type) -> str | None:
    """Why the steps of a trainer cannot be cut, or None. `stock` is the class that is patched."""
    reason = unsupported_processes_reason(trainer)
    if reason is not None:
        return reason
    loss = ("compute_loss", "_compute_loss")
    if is_overridden(trainer, stock, loss) or bypass_reason(trainer, stock, ("training_step",)):
        return f"{type(trainer).__name__}, which overrides the loss or the steps of {stock.__name__}"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss of routers, which is not a mean over rows"
    loss_type = getattr(trainer, "loss_type", "grpo")
    if loss_type not in MEANS_OVER_ROWS | SUMS_OVER_A_GENERATION:
        return f"loss_type={loss_type!r}, which depends on the batch of a row"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "an entropy bonus, which is a mean over the tokens of a batch"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile below 1, which ranks the tokens of a batch"
    return None
