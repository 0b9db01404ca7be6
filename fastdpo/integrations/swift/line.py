"""What the trainer lines of ms-swift share: its trainers, their models and their batches.

ms-swift deletes `__init__` of TRL's trainers, whose subclasses its trainers are. A trainer of
ms-swift has its state before functions of TRL run, so the line of TRL's own trainer leaves it alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...models import forward
from ...models.adapters import without_adapters
from ...models.batch import inputs_once
from ...models.reward_head import CLASSIFIER_HEAD
from ...reasons import Reason
from ..line import TrainerLine
from ..options import liger_reason
from ..scored_rows import Inputs
from .batches import inputs_of

SCORES = ("get_per_token_logps", "_packed_sequence_sum", "get_cu_seqlens", "prepare_logits_to_keep")
"""What the functions that score batches call in ms-swift."""


class SwiftLine(TrainerLine):
    """One trainer line of ms-swift."""

    logged = ("mean_logits",)

    def inputs_of(self, trainer: Any, batch: dict[str, Any], model: Any, *, router_logits: bool) -> Inputs | Reason:
        """`batches.inputs_of`, with the same tensors for policy and reference; or the reason why no
        call of the model can be fused, as far as it is known.

        Args:
            trainer: with a state.
            batch: of its template.
            model: of the trainer.
            router_logits: whether the call asks for the auxiliary loss of a router.
        """
        reason = forward.unsupported_reason(model, self.name)
        if reason is not None:
            return reason
        tensors = tuple(x for x in batch.values() if isinstance(x, Tensor))
        options = dict(padding_free=trainer.template.padding_free, router_logits=router_logits)
        return inputs_once(self.state_of(trainer), tensors, lambda: inputs_of(batch, **options))

    def prepared_reason(self, trainer: Any) -> Reason | None:
        from transformers import PreTrainedModel

        base = without_adapters(trainer.model)
        if not isinstance(base, PreTrainedModel):
            return Reason("model-type", kind=type(base).__name__)
        if trainer.model_meta.is_multimodal:
            return Reason("multimodal-template")
        if trainer.template.sequence_parallel_size > 1:
            return Reason("split-sequences", method="sequence parallelism")
        if getattr(trainer.args, "tuner_backend", None) == "unsloth":
            return Reason("unsloth")
        return liger_reason(trainer.args)


class SwiftRewardLine(SwiftLine):
    """RewardTrainer. Its loss is computed from what its model returns, so that nothing of it is replaced."""

    rewards = CLASSIFIER_HEAD
