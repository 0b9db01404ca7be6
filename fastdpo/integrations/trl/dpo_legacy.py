"""TRL's DPOTrainer before its rewrite, patched where it scores a batch, in `concatenated_forward`.

Training, evaluation, the reference and precomputing all call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from ...logs import warn
from ...models import forward
from ...models.calls import counting_calls_as
from ...reasons import Reason
from ..gathering import of_all_ranks
from ..line import TrainerLine, liger_reason
from ..replacements import temporarily
from ..scored_rows import Inputs
from .dpo_legacy_batches import inputs_of, results_of
from .dpo_legacy_memory import remembered
from .rewritten_dpo import init_padded

if TYPE_CHECKING:
    DPOTrainer = Any  # types are checked in an environment with another TRL

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "batch", "is_ref_model"],
    "concatenated_inputs": ["batch", "padding_value"],
    "get_batch_loss_metrics": ["self", "model", "batch", "train_eval"],
}


class LegacyDPOLine(TrainerLine):
    parameters = _PARAMETERS
    replaced = ("concatenated_forward", "get_batch_loss_metrics")
    path = ("get_batch_loss_metrics", "concatenated_forward")

    def unsupported_reason(self) -> Reason | None:
        missing = [name for name in ("flush_left", "flush_right") if not hasattr(self.module(), name)]
        if missing:
            return Reason("different-code", difference=f"trl.trainer.dpo_trainer must have {missing[0]}")
        return super().unsupported_reason()

    def prepared_reason(self, trainer: DPOTrainer) -> Reason | None:
        return liger_reason(trainer.args)

    def statistics(self, trainer: DPOTrainer) -> tuple[str, ...]:
        return ("mean_logits", *(("log_sum_sq_probs",) if trainer.use_weighting else ()))

    def replace(self) -> None:
        if self.options.max_tokens:
            warn(f"{self.name}: max_tokens requires TRL 1.8 or later")
        super().replace()

    def init(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        if init_padded(stock, trainer, *args, **kwargs):
            self.prepare(trainer)
            trainer.padding_free = True
            if not forward.is_fused(trainer.model):
                warn(f"{self.name}: padding_free=True falls back to TRL for the reason logged above")

    def concatenated_forward(
        self, stock: Callable, trainer: DPOTrainer, model: Any, batch: dict[str, Any], is_ref_model: bool = False
    ) -> dict[str, Tensor]:
        if not self.calls(trainer, model):  # created before patch()
            return stock(trainer, model, batch, is_ref_model)

        def from_logits(of_model):
            padded = of_model is not model  # the batch that has been run
            with temporarily(trainer, padding_free=False) if padded else nullcontext():
                return stock(trainer, of_model, batch, is_ref_model)

        inputs = self._inputs_of(trainer, batch)
        results = functools.partial(results_of, trainer, is_ref_model, cast(Inputs, inputs))
        with counting_calls_as("reference") if is_ref_model else nullcontext():
            return self.score(model, inputs, results, from_logits)

    def get_batch_loss_metrics(
        self, stock: Callable, trainer: DPOTrainer, model: Any, batch: dict[str, Any], train_eval: str = "train"
    ) -> Any:
        state = self.state_of(trainer)
        if state is None:
            return stock(trainer, model, batch, train_eval)
        known = remembered(trainer, state.memory, batch, lambda: self._inputs_of(trainer, batch))
        with of_all_ranks(trainer.accelerator):
            return stock(trainer, model, {**batch, **known}, train_eval)

    def _inputs_of(self, trainer: DPOTrainer, batch: dict[str, Any]) -> Inputs | Reason:
        """`inputs_of`, with the same tensors for policy and reference."""
        tensors = tuple(x for x in batch.values() if isinstance(x, Tensor))
        return self.state_of(trainer).batches[""].get(tensors, lambda: inputs_of(trainer, batch))
