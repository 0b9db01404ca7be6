"""The auxiliary loss of mixture-of-experts routers, computed from packed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from .parts import text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def returns_router_logits(model: PreTrainedModel, kwargs: dict) -> bool:
    """Whether a call asks for router logits, itself or, as in the model's
    own forward, by the configuration.
    """
    requested = kwargs.get("output_router_logits")
    return bool(getattr(text_config(model), "output_router_logits", False) if requested is None else requested)


def router_loss(config: PretrainedConfig, router_logits: tuple[Tensor, ...], multiplicity: Tensor) -> Tensor:
    """The load-balancing loss over the real tokens of a batch (Switch Transformers, Fedus et al.
    2021, eqs. 4 to 6).

    Args:
        config: of the model.
        router_logits: of each layer, [T, experts] for T packed tokens.
        multiplicity: [1, T], how often each packed token occurs in the batch.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts  # Mixtral's name in transformers 4
    # The function weighs tokens by its mask, so a shared token counts as often as it occurs.
    loss = load_balancing_loss_func(
        cast(tuple[Tensor], router_logits), experts, config.num_experts_per_tok, multiplicity
    )
    return cast(Tensor, loss)
