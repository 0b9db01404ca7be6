"""The parts of a multimodal model that its text passes through.

A model of text alone is its own language model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """The configuration of the language model."""
    return model.config.get_text_config()


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that has its text configuration, or the model itself if there is no such part.

    Image and audio towers lie outside of it.
    """
    from transformers import PreTrainedModel

    config = text_config(model)
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is config)
    return next(parts, model)


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Everything of a model but its head: its towers and its language model.

    Multimodal models of transformers 4 have it as `model`, and are their own `base_model`.
    """
    inner = getattr(model, "model", None)
    return cast("PreTrainedModel", inner if model.base_model is model and inner is not None else model.base_model)
