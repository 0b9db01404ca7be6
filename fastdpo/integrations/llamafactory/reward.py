"""LLaMA-Factory's PairwiseTrainer, patched where it calls its model. Its loss is its own code.

The model is TRL's AutoModelForCausalLMWithValueHead: a causal LM whose last hidden states are given to a
value head outside of it. The LM computes the hidden state of each row's last token, and the value head,
with its dropout, the value of that.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without LLaMA-Factory.

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...models.reward_head import RewardHead, labels_at
from ...reasons import Reason
from ..line import TrainerLine
from .line import replaced_kernels

if TYPE_CHECKING:
    from llamafactory.train.rm.trainer import PairwiseTrainer


class _LastStates(RewardHead):
    """The scores are hidden states [N, D], for a value head. The tokens are those whose values the trainer reads."""

    scored = "hidden states"
    every_call = False
    ignored = ("output_hidden_states",)
    own_arguments = MappingProxyType({"use_cache": False, "output_hidden_states": True})

    def unsupported_reason(self, model: Any) -> None:
        """Every model has hidden states."""

    def labels_of(self, model: Any, kwargs: dict[str, Any]) -> Tensor:
        return labels_at(kwargs["input_ids"], kwargs["attention_mask"].sum(1) - 1)

    def scores(self, model: Any, hidden: Tensor) -> Tensor:
        return hidden

    def returned(self, output: Any, is_scored: Tensor) -> Tensor:
        return output.hidden_states[-1][is_scored][:, None]

    def make_output(self, scored: Any, kwargs: dict[str, Any]) -> object:
        from transformers.modeling_outputs import CausalLMOutput

        states = scored.logps.logps  # [R, 1, D]
        return CausalLMOutput(logits=states.new_empty(0), hidden_states=(states,))


class FactoryRewardLine(TrainerLine):
    relies_on = ("compute_loss",)
    replaced = ("compute_loss",)
    rewards = _LastStates()

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        return replaced_kernels(arguments.get("args"), arguments["model"])

    def compute_loss(
        self,
        stock: Callable,
        trainer: PairwiseTrainer,
        model: nn.Module,
        inputs: dict[str, Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self.fuses(trainer, model):
            return stock(trainer, model, inputs, *args, **kwargs)

        def called(labels: Tensor | None = None, **others: Any) -> tuple[Any, Any, Tensor]:
            """The labels are those of a causal LM's loss, which the trainer does not use."""
            logits, loss, values = model(**others, fused_lm_head=True)
            return logits, loss, values.expand(inputs["input_ids"].shape)  # those of last tokens, if it was fused

        return stock(trainer, called, inputs, *args, **kwargs)
