"""The models of a trainer that has no seam of its own for its models' heads."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, Trainer


def new_models(trainer: Trainer, known: weakref.WeakSet) -> list[tuple[str, PreTrainedModel]]:
    """Role and causal LM of each model of a trainer that is not known yet. Adds them to the known
    ones.

    To be called when the accelerator is created, and again when the trainer has been created: in
    between, transformers 4 sets the policy. A trainer without a reference model uses its policy
    without adapters.
    """
    from accelerate.utils import extract_model_from_parallel, is_peft_model

    models = []
    for role, name in (("policy", "model"), ("reference", "ref_model")):
        wrapped = vars(trainer).get(name)
        if wrapped is None:
            continue
        model = extract_model_from_parallel(wrapped, keep_torch_compile=False)
        if model not in known:
            known.add(model)
            models.append((role, cast("PeftModel", model).get_base_model() if is_peft_model(model) else model))
    return models
