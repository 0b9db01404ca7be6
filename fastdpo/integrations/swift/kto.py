"""ms-swift's KTOTrainer, patched where it gives the model a batch and where it reads its logits.

`forward` makes two calls of a model, one for the completions and one for the KL term, which has each
prompt with the completion of another one. Rows of a call share what they begin with. Without
gradients, both are one call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...models.forward import record_fallback
from ...models.parts import base_of
from ...reasons import Reason
from ..bypass import is_overridden
from ..replacements import temporarily
from ..scored_rows import Inputs, ScoredRows, equal_when_merged, merged, parts_of
from ..trl.fused_logits import FusedLogits
from .line import SCORES, SwiftLine

_COMPLETIONS, _KL = "completion_", "KL_completion_"
"""What the names of the entries of a batch begin with."""
_KL_OUTPUT = "KL_output"
_ROWS = ("input_ids", "attention_mask", "labels")


class SwiftKTOLine(SwiftLine):
    replaced = ("forward", "_get_model_kwargs", "_compute_kl_logps", "get_batch_logps")
    relies_on = (*replaced, *SCORES)

    def forward(self, stock: Callable, trainer: Any, model: Any, batch: dict[str, Any]) -> Any:
        if not self.fuses(trainer, model):
            return stock(trainer, model, batch)
        prefixes = (prefix for prefix in (_COMPLETIONS, _KL) if f"{prefix}labels" in batch)
        inputs: dict[str, Any] = {x: self._inputs_of_kind(trainer, model, batch, x) for x in prefixes}
        reason = next((x for x in inputs.values() if isinstance(x, Reason)), None)
        if is_overridden(trainer, self.trainer_class(), ("get_batch_logps",)):
            reason = Reason("may-read-logits", function=f"{type(trainer).__name__}.get_batch_logps")
        if reason is not None:
            record_fallback(model, self.name, reason)
            return stock(trainer, model, batch)
        with temporarily(self.state_of(trainer), running=inputs):
            if not self._merges(trainer, model, inputs):
                return stock(trainer, model, batch)
            completions, KL = inputs[_COMPLETIONS], inputs[_KL]
            rows = merged({name: completions[name] for name in _ROWS}, KL)
            output = model(**{**completions, **rows}, fused_lm_head=True)
            scored, inputs[_KL_OUTPUT] = parts_of(output, completions["input_ids"], KL["input_ids"])
            return stock(trainer, lambda **kwargs: scored, batch)

    def _get_model_kwargs(self, stock: Callable, trainer: Any, inputs: dict[str, Any], prefix: str) -> Any:
        running = self.state_of(trainer).running
        if running is None:
            return stock(trainer, inputs, prefix)
        rows = running[prefix]
        return {**rows, "fused_lm_head": True}, rows["labels"]

    def _compute_kl_logps(self, stock: Callable, trainer: Any, model: Any, batch: dict[str, Any]) -> Any:
        running = self.state_of(trainer).running
        if running is None or _KL_OUTPUT not in running:
            return stock(trainer, model, batch)
        kwargs, labels = trainer._get_model_kwargs(batch, _KL)
        return trainer.get_batch_logps(kwargs, running[_KL_OUTPUT].logits, labels)[0]

    def get_batch_logps(
        self, stock: Callable, trainer: Any, inputs: dict[str, Any], logits: Any, labels: Tensor
    ) -> Any:
        if isinstance(logits, FusedLogits):
            rows: ScoredRows = logits.rows
            if rows.mean_logits is None:  # of the reference
                return rows.sums(), torch.zeros_like(rows.sums())
            head: Any = base_of(trainer.model, self.name).get_output_embeddings()
            return rows.sums(), rows.mean_logits.sum(1) * head.out_features
        # If the call fell back, the logits are those of padded rows.
        with temporarily(trainer.template, padding_free=False) if "fused_lm_head" in inputs else nullcontext():
            return stock(trainer, inputs, logits, labels)

    def _merges(self, trainer: Any, model: Any, inputs: dict[str, Any]) -> bool:
        """Whether the two calls for a batch are one fused call with equal results."""
        if torch.is_grad_enabled() or not trainer.calculate_KL or trainer.aux_loss_enabled:
            return False
        if is_overridden(trainer, self.trainer_class(), ("_compute_kl_logps", "_get_model_kwargs")):
            return False
        return equal_when_merged(model, inputs[_COMPLETIONS]["input_ids"], inputs[_KL]["input_ids"])

    def _inputs_of_kind(self, trainer: Any, model: Any, batch: dict[str, Any], prefix: str) -> Inputs | Reason:
        part = {name.removeprefix(prefix): x for name, x in batch.items() if name.startswith(prefix)}
        # `forward` asks for router logits.
        return self.inputs_of(trainer, part, model, router_logits=False)
