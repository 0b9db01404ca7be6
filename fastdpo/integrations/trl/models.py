"""The models of a trainer that has no seam of its own for its models' heads."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

from torch import nn

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, Trainer


def models_of(trainer: Trainer) -> dict[str, nn.Module]:
    """The models that a trainer has now by role, without the wrappers of engines."""
    from accelerate.utils import extract_model_from_parallel

    wrapped = {role: vars(trainer).get(name) for role, name in (("policy", "model"), ("reference", "ref_model"))}
    return {
        role: extract_model_from_parallel(model, keep_torch_compile=False)
        for role, model in wrapped.items()
        if model is not None
    }


def new_models(trainer: Trainer, known: weakref.WeakSet) -> list[tuple[str, PreTrainedModel]]:
    """Role and causal LM of each model of a trainer that is not known yet. Adds them to the known
    ones.

    To be called when the accelerator is created, and again when the trainer has been created: in
    between, transformers 4 sets the policy. A trainer without a reference model uses its policy
    without adapters.
    """
    from accelerate.utils import is_peft_model

    models = []
    for role, model in models_of(trainer).items():
        if model not in known:
            known.add(model)
            models.append((role, cast("PeftModel", model).get_base_model() if is_peft_model(model) else model))
    return models
