"""The models of a trainer that has no seam of its own for its models' heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ...models.wrapped import without_engines

if TYPE_CHECKING:
    from transformers import Trainer


def models_of(trainer: Trainer) -> dict[str, nn.Module]:
    """The models that a trainer has now by role, without the wrappers of engines."""
    wrapped = {role: vars(trainer).get(name) for role, name in (("policy", "model"), ("reference", "ref_model"))}
    return {role: without_engines(model) for role, model in wrapped.items() if model is not None}


def reward_models_of(trainer: Trainer) -> list[nn.Module]:
    """Those of a trainer's reward functions that are models."""
    return [x for x in vars(trainer).get("reward_funcs") or () if isinstance(x, nn.Module)]
