"""The models of TRL's trainers: the reference, which may be the policy with its adapters disabled."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from ...models.adapters import with_adapter
from ...models.parts import without_engines

if TYPE_CHECKING:
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer


def reference_of(trainer: DPOTrainer | KTOTrainer) -> nn.Module:
    """The trainer's reference model, or its policy, which then is the
    reference inside `as_reference`.
    """
    # A compiled model has no truth value.
    return cast(nn.Module, trainer.model if trainer.ref_model is None else trainer.ref_model)


def reference_logps(trainer: Any, inputs: dict[str, Any], model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
    """The reference's log-probabilities of chosen and rejected completions, [B] each, by TRL's own
    function.

    `model` is the engine that runs the reference if it is not the trainer's own model.
    """
    takes_model = "model" in inspect.signature(trainer.compute_ref_log_probs).parameters  # since TRL 1.9
    given = [reference_of(trainer) if model is None else model] if takes_model else []
    return trainer.compute_ref_log_probs(*given, inputs)


def as_reference(trainer: Any) -> AbstractContextManager[None]:
    """A context in which a policy that is its own reference acts as such: with its adapters disabled, or with
    the copy named "ref".
    """
    if trainer.ref_model is not None:
        return nullcontext()
    adapters = getattr(without_engines(trainer.model), "peft_config", None)
    if adapters is None:
        return nullcontext()
    return with_adapter(trainer.model, "ref" if "ref" in adapters else None, "as_reference")
