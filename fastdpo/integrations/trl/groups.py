"""What TRL's GRPOTrainer and RLOOTrainer share: groups of completions, which share their prompt.

Both compute the log-probabilities of completions by `_get_per_token_logps_and_entropies`: those of
the policy with gradients, and, before a batch is trained on, those of the old policy and of the
reference. All of them are fused. The trainer shuffles the completions of all prompts, so rows of a
batch share what they begin with, wherever they are.

Positions count from the first real token, as during generation. TRL passes no positions, so that
behind left padding a model with learned positions, such as GPT-2, sees other positions than those
that it generated with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from ...models.calls import counting_calls_as
from ...reasons import Reason
from ..line import option_reason
from .batches.group_budget import GroupBudget
from .row_budget_line import RowBudgetLine

_SCORES = "_get_per_token_logps_and_entropies"
_PARAMETERS = {
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "_compute_loss": ["self", "model", "inputs"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    _SCORES: [
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        *("compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask"),
        *("spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ],
}

DISABLING = ("use_liger_kernel", "use_transformers_continuous_batching", "use_transformers_paged")
"""Options that leave a trainer as it is.

Liger computes the loss from hidden states. The others generate with an attention that they select
by the name of the model's, which packing changes.
"""


class GroupLine(RowBudgetLine):
    """The line of one of the two trainers."""

    parameters = _PARAMETERS
    module_parameters = MappingProxyType({"use_adapter": ["model", "adapter_name"]})
    module_replaced = ("add_fused_lm_head", "use_adapter")
    path = ("compute_loss", "_compute_loss", _SCORES, "fused_lm_head")
    kind_without_gradient = "old_policy"
    budget_class = GroupBudget
    replaced_with_budget = ("training_step", _SCORES)

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        return option_reason(arguments.get("args"), DISABLING)

    def training_step(self, stock: Callable, trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's own, which counts batches and takes the time of a step, around one that cuts the step."""
        budget = self.budget_of(trainer)
        if budget is None:
            return stock(trainer, model, inputs, *args, **kwargs)
        start, step = time.perf_counter(), super(self.trainer_class(), trainer).training_step
        loss = budget.training_step(trainer, model, inputs, lambda batch: step(model, batch, *args, **kwargs))
        trainer._step += 1
        trainer._current_train_step_time += time.perf_counter() - start
        if trainer._step % trainer.current_gradient_accumulation_steps == 0:
            trainer._metrics["train"]["step_time"].append(trainer._current_train_step_time)
            trainer._current_train_step_time = 0.0
        return loss

    def _get_per_token_logps_and_entropies(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        budget = self.budget_of(trainer)
        if budget is None:
            return stock(trainer, *args, **kwargs)
        return budget.scores(lambda: stock(trainer, *args, **kwargs), lambda scores: scores[:2])

    @contextmanager
    def use_adapter(
        self, stock: Callable, model: Any, adapter_name: str | None, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """TRL makes a policy with adapters act as its own reference here, and nowhere else."""
        with counting_calls_as("reference"), stock(model, adapter_name, *args, **kwargs):
            yield
