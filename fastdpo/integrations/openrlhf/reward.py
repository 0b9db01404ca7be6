"""OpenRLHF's RewardModelTrainer, patched where it calls its model. Losses and metrics are its own code."""

# pyright: reportMissingImports=false
# Types are checked in an environment without OpenRLHF.

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...models.reward_head import RewardHead, labels_at
from ...reasons import Reason
from .line import OpenRLHFLine

if TYPE_CHECKING:
    from openrlhf.trainer.rm_trainer import RewardModelTrainer

_PARAMETERS = {
    "openrlhf.models.model:_get_reward_model": [
        *("base_pretrained_model", "base_llm_model", "value_head_prefix", "packing_samples", "..."),
    ],
}


class _ValueHead(RewardHead):
    """A class that OpenRLHF makes around a backbone. Its layer of one label has any name. The token is the last one
    that the attention mask has, and the positions of tokens count from the first.
    """

    every_call = False
    ignored = ("return_output",)
    own_arguments = MappingProxyType({})
    runs_padded = False

    def module_of(self, model: Any) -> nn.Module | None:
        return getattr(model, getattr(model, "value_head_prefix", "score"), None)

    def unsupported_reason(self, model: Any) -> Reason | None:
        return Reason("no-score", model=type(model).__name__) if self.module_of(model) is None else None

    def labels_of(self, model: Any, kwargs: dict[str, Any]) -> Tensor:
        mask = kwargs["attention_mask"]
        return labels_at(kwargs["input_ids"], mask.shape[1] - 1 - mask.long().flip(1).argmax(1))

    def returned(self, output: Any, is_scored: Tensor) -> Tensor:
        return (output[0] if isinstance(output, tuple) else output)[:, None]

    def make_output(self, scored: Any, kwargs: dict[str, Any]) -> tuple[Tensor, dict]:
        return scored.logps.logps[:, 0], {}  # a backbone returns no router loss, which the trainer looks for


class OpenRLHFRewardLine(OpenRLHFLine):
    parameters = _PARAMETERS
    relies_on = ("concatenated_forward",)
    rewards = _ValueHead()

    def concatenated_forward(
        self, stock: Callable, trainer: RewardModelTrainer, model: nn.Module, *batch: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        if not self.fuses(trainer, model):
            return stock(trainer, model, *batch)

        def called(ids: Tensor, ring_attn_group: None, **kwargs: Any) -> Any:
            return model(input_ids=ids, fused_lm_head=True, **kwargs)

        return stock(trainer, called, *batch)
