"""What TRL's GRPOTrainer and RLOOTrainer share: groups of completions, which share their prompt.

Both compute the log-probabilities of completions by `_get_per_token_logps_and_entropies`: those of
the policy with gradients, and, before a batch is trained on, those of the old policy and of the
reference. All of them are fused. The trainer shuffles the completions of all prompts, so rows of a
batch share what they begin with, wherever they are.

TRL shuffles the completions of a generation before it cuts them into the batches that a step accumulates, and only
rows of one batch can share their prompt. With `patch(max_tokens=...)`, the batches of a step are collected as far as
they come from one generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.calls import counting_calls_as
from ...reasons import Reason
from ..options import option_reason
from .fused_head import FusedHeadLine
from .max_tokens.budget import STEPS, Budget
from .max_tokens.refusals import NotCut
from .max_tokens.steps import Batch

_SCORES = "_get_per_token_logps_and_entropies"
_GENERATIONS = (
    *("_prepare_inputs", "_generate_and_score_completions", ":shuffle_sequence_dict", ":split_tensor_dict"),
    *(":split_pixel_values_by_grid", ":unsplit_pixel_values_by_grid"),
)
"""The functions that make a generation, and batches of it."""

DISABLING = ("use_liger_kernel", "use_transformers_continuous_batching", "use_transformers_paged")
"""Options that leave a trainer as it is.

Liger computes the loss from hidden states. The others generate with an attention that they select
by the name of the model's, which packing changes.
"""

MEANS_OVER_ROWS = {"grpo", "sapo", "dr_grpo", "luspo"}
SUMS_OVER_A_GENERATION = {"dapo", "cispo", "vespo"}
"""The values of `loss_type` that are supported, by what divides a loss: its own rows and the number of batches that a
step accumulates, or the tokens of a generation.
"""


def uncuttable(trainer: Any) -> str | None:
    loss_type = getattr(trainer, "loss_type", "grpo")
    if loss_type not in MEANS_OVER_ROWS | SUMS_OVER_A_GENERATION:
        return f"loss_type={loss_type!r}, which depends on the batch of a row"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "an entropy bonus, which is a mean over the tokens of a batch"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile below 1, which ranks the tokens of a batch"
    return None


@dataclass(kw_only=True, eq=False)
class GroupBudget(Budget):
    """How steps are cut."""

    replaced: ClassVar = (*Budget.replaced, _SCORES)

    def training_step(self, stock: Callable, trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's own, which counts batches and takes the time of a step, around one that cuts the step."""
        budget = self.line.state_of(trainer).budget
        if budget.keeps(model):
            return stock(trainer, model, inputs, *args, **kwargs)
        start, step = time.perf_counter(), super(self.line.trainer_class(), trainer).training_step
        loss = budget.training_step(model, inputs, lambda batch: step(model, batch, *args, **kwargs))
        trainer._step += 1
        trainer._current_train_step_time += time.perf_counter() - start
        if trainer._step % trainer.current_gradient_accumulation_steps == 0:
            trainer._metrics["train"]["step_time"].append(trainer._current_train_step_time)
            trainer._current_train_step_time = 0.0
        return loss

    def _get_per_token_logps_and_entropies(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        budget = self._of(trainer)
        if budget is None:
            return stock(trainer, *args, **kwargs)
        if budget.known is not None:
            return budget.known["logps"], budget.known["entropies"], None  # no auxiliary loss
        returned = stock(trainer, *args, **kwargs)
        budget.note({"logps": returned[0], "entropies": returned[1]})
        return returned

    def must_train(self, trainer: Any) -> bool:
        return (trainer._step + 1) % (trainer.args.steps_per_generation * trainer.num_iterations) == 0

    def size(self, batch: Batch) -> int:
        return len(batch["completion_ids"])

    def joined(self, trainer: Any, batches: list[Batch]) -> Batch:
        return {name: joined_entry(name, [x[name] for x in batches]) for name in batches[0]}

    def tokens(self, joined: Batch) -> list[list[NDArray[np.int64]]]:
        parts = (joined[f"{x}_ids"].masked_fill(joined[f"{x}_mask"] == 0, -1) for x in ("prompt", "completion"))
        return [[row[row >= 0]] for row in torch.cat([*parts], 1).cpu().numpy()]

    def width(self, batch: Batch) -> int:
        return batch["completion_ids"].shape[1]

    def padded_tokens(self, batch: Batch) -> int:
        return batch["prompt_ids"].numel() + batch["completion_ids"].numel()

    def micro_batch(self, trainer: Any, joined: Batch, units: Tensor) -> Batch:
        units = units.to(trainer.accelerator.device)
        return {name: x[units] if x is not None and x.ndim else x for name, x in joined.items()}

    def weight(self, trainer: Any, batch: Batch) -> float:
        is_sum = getattr(trainer, "loss_type", None) in SUMS_OVER_A_GENERATION
        return 0 if is_sum else super().weight(trainer, batch)


def joined_entry(name: str, values: list[Any]) -> Tensor | None:
    """An entry of batches of one generation, in one tensor."""
    first = values[0]
    if first is None or (isinstance(first, Tensor) and first.ndim == 0):  # of the whole generation
        return first
    if not isinstance(first, Tensor) or name.startswith(("pixel", "image")):
        raise NotCut(f"batches with {name}, such as those with images")
    return torch.cat(values)


class GroupLine(FusedHeadLine):
    """The line of one of the two trainers."""

    replaced = (":use_adapter",)
    cutting = GroupBudget(
        relies_on=(*STEPS, *_GENERATIONS, "compute_loss", "_compute_loss", _SCORES), uncuttable=uncuttable
    )
    kind_without_gradient = "old_policy"

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        return option_reason(arguments.get("args"), DISABLING)

    @contextmanager
    def use_adapter(
        self, stock: Callable, model: Any, adapter_name: str | None, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """TRL makes a policy with adapters act as its own reference here, and nowhere else."""
        with counting_calls_as("reference"), stock(model, adapter_name, *args, **kwargs):
            yield
