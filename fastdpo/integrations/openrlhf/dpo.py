"""OpenRLHF's DPOTrainer, patched where it scores a batch, in `concatenated_forward`.

`Actor.forward` is not patched, since PPO and SFT use it, too. OpenRLHF stores logits and their
float32 copy for every token of prompts and answers. Here, no padding is computed, whether or not
`packing_samples` is set, and only answers are scored.

OpenRLHF reduces each number of its log in a collective of its own. Here, a log is one collective.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without OpenRLHF.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...models import forward
from ...models.state import ForwardOptions
from ...reasons import Reason
from ..line import TrainerLine
from ..scored_rows import Inputs
from ..signatures import first_difference
from .batches import Results, rows_of, score
from .memory import LoaderWithCallback, memory_enabled, remembered

if TYPE_CHECKING:
    from openrlhf.models import Actor
    from openrlhf.trainer.dpo_trainer import DPOTrainer

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "concatenated_inputs": ["self", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "_get_batch_logps": ["self", "per_token_logps", "attention_mask", "prompt_id_lens"],
    "save_logs_and_checkpoints": ["self"],
}
_STRATEGY_PARAMETERS = {"all_reduce": ["self", "data", "op"]}
_ACTOR_PARAMETERS = {"forward": ["self", "sequences"]}


class OpenRLHFLine(TrainerLine):
    parameters = _PARAMETERS
    exact = False  # some versions have more
    replaced = ("concatenated_forward", "fit", "evaluate", "save_logs_and_checkpoints")
    path = ("concatenated_forward",)

    def unsupported_reason(self) -> Reason | None:
        from openrlhf.models import Actor
        from openrlhf.utils.deepspeed import DeepspeedStrategy

        others = {DeepspeedStrategy: _STRATEGY_PARAMETERS, Actor: _ACTOR_PARAMETERS}
        differences = (first_difference(owner, functions, exact=False) for owner, functions in others.items())
        return super().unsupported_reason() or next(filter(None, differences), None)

    def models(self, trainer: DPOTrainer) -> dict[str, nn.Module]:
        return {"policy": trainer.model, "reference": trainer.ref_model}

    def request(self, trainer: DPOTrainer, role: str) -> ForwardOptions:
        actor = trainer.model if role == "policy" else trainer.ref_model
        return super().request(trainer, role)._replace(temperature=actor.temperature)

    def replace(self) -> None:
        from openrlhf.utils.deepspeed import DeepspeedStrategy

        super().replace()
        self.replacements.wrap(DeepspeedStrategy, "all_reduce", _all_reduce)

    def fit(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        state = self.state_of(trainer)
        if state is None or not state.memory.enabled:
            stock(trainer, *args, **kwargs)
            return
        loader = trainer.train_dataloader
        trainer.train_dataloader = LoaderWithCallback(loader, state.memory.exchange)
        try:
            stock(trainer, *args, **kwargs)
        finally:
            trainer.train_dataloader = loader

    def save_logs_and_checkpoints(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        self.first_log(trainer)
        stock(trainer, *args, **kwargs)

    def evaluate(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        stock(trainer, *args, **kwargs)
        state = self.state_of(trainer)
        if state is not None and state.memory.enabled:
            state.memory.exchange()

    def concatenated_forward(
        self,
        stock: Callable,
        trainer: DPOTrainer,
        model: Actor,
        chosen_ids: Tensor,
        c_mask: Tensor,
        reject_ids: Tensor,
        r_mask: Tensor,
        prompt_id_lens: list[int],
    ) -> Results:
        batch = (chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens)
        state = self.state_of(trainer)
        if state is None:  # created before patch()
            return stock(trainer, model, *batch)
        scored = functools.partial(self._scored, stock, trainer, model)
        if model is trainer.ref_model and memory_enabled(trainer, state.memory, chosen_ids.device):
            return remembered(trainer, state.memory, self._rows_of(trainer, *batch), scored, *batch)
        return scored(*batch)

    def _scored(self, stock: Callable, trainer: DPOTrainer, model: Actor, *batch: Any) -> Results:
        reason = strategy_unsupported_reason(trainer) or forward.disabled_reason(model, self.name)
        if reason is not None:
            forward.record_fallback(model, self.name, reason)
            return stock(trainer, model, *batch)
        return score(trainer, model, self._rows_of(trainer, *batch), batch[-1])

    def _rows_of(self, trainer: DPOTrainer, *batch: Any) -> Inputs:
        """`rows_of`, with the same tensors for policy and reference."""
        return self.state_of(trainer).batches[""].get(batch[:-1], lambda: rows_of(trainer, *batch))


def _all_reduce(stock: Callable, strategy: Any, data: Any, op: str = "mean") -> Any:
    if not isinstance(data, dict) or any(isinstance(x, Tensor | dict) for x in data.values()):
        return stock(strategy, data, op)
    reduced = stock(strategy, torch.tensor(list(data.values()), dtype=torch.float32, device="cpu"), op)
    return dict(zip(data, reduced.tolist(), strict=True))


def strategy_unsupported_reason(trainer: Any) -> Reason | None:
    strategy = trainer.strategy
    if strategy.ring_attn_group is not None:
        return Reason("split-sequences", method="ring attention")
    if getattr(strategy, "ds_tensor_parallel_size", 1) > 1:
        return Reason("split-model")
    return None
