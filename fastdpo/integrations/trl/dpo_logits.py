"""TRL's DPOTrainer from its rewrite in TRL 0.29 to TRL 1.14, which computes from logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...packing import IGNORE_INDEX
from ...reasons import Reason
from .dpo import PAIRS, DPOTrainer, RewrittenDPOLine
from .logits_line import LogitsBudget, LogitsLine


class LogitsDPOLine(LogitsLine, RewrittenDPOLine):
    replaced = (*RewrittenDPOLine.replaced, "compute_ref_log_probs")
    cutting = LogitsBudget(**PAIRS)

    def unsupported_reason(self) -> Reason | None:
        if "logits" not in self.trainer_class()._compute_loss.__code__.co_names:
            return Reason("different-code", difference="DPOTrainer._compute_loss must read logits")
        return super().unsupported_reason()

    def statistics(self, trainer: DPOTrainer) -> tuple[str, ...]:
        weighting = ("log_sum_sq_probs",) if trainer.use_weighting else ()
        return (*super().statistics(trainer), *weighting)

    def replace(self) -> None:
        super().replace()
        self.replacements.put(self.trainer_class(), "ref_model", property(_reference_model, self.set_reference_model))

    def set_reference_model(self, trainer: DPOTrainer, model: nn.Module | None) -> None:
        """TRL sets it twice: as it is, and as accelerate has prepared it.

        Preparing the models in between makes accelerate wrap our forward, not the reverse.
        """
        vars(trainer)["ref_model"] = model
        self.prepare(trainer)

    def compute_ref_log_probs(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> Any:
        inputs = kwargs["inputs"] if "inputs" in kwargs else args[-1]  # TRL before 1.9 does not pass the model
        with self.scoring(trainer, inputs, False):
            return stock(trainer, *args, **kwargs)

    def labels(self, trainer: DPOTrainer, inputs: dict[str, Any]) -> Tensor:
        if not hasattr(trainer, "_truncate_inputs"):
            return super().labels(trainer, inputs)
        tensors = (inputs[name] for name in ("input_ids", "attention_mask", "completion_mask"))
        ids, _, completion = trainer._truncate_inputs(*tensors)  # TRL 0.29 truncates batches
        return ids.masked_fill(completion == 0, IGNORE_INDEX)


def _reference_model(trainer: DPOTrainer) -> nn.Module | None:
    try:
        return vars(trainer)["ref_model"]
    except KeyError:
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute 'ref_model'") from None
