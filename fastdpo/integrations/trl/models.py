"""The models of a trainer that has no seam of its own for its models' heads."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

from torch import nn

from ...models.wrapped import without_adapters, without_engines

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


def models_of(trainer: Trainer) -> dict[str, nn.Module]:
    """The models that a trainer has now by role, without the wrappers of engines."""
    wrapped = {role: vars(trainer).get(name) for role, name in (("policy", "model"), ("reference", "ref_model"))}
    return {role: without_engines(model) for role, model in wrapped.items() if model is not None}


def new_models(trainer: Trainer, known: weakref.WeakSet) -> list[tuple[str, PreTrainedModel]]:
    """Role and causal LM of each model of a trainer that is not known yet. Adds them to the known
    ones.

    To be called when the accelerator is created, and again when the trainer has been created: in
    between, transformers 4 sets the policy. A trainer without a reference model uses its policy
    without adapters.
    """
    models = []
    for role, model in models_of(trainer).items():
        if model not in known:
            known.add(model)
            models.append((role, cast("PreTrainedModel", without_adapters(model))))
    return models
