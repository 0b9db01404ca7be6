"""LLaMA-Factory's KTOTrainer, patched where it scores rows, in `forward`.

For each batch, the trainer scores its completions and, for the KL term, the same prompts with other
completions. Where no gradient is needed, which is in the reference and in evaluations, both are
scored in one call, in which they share their prompts.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without LLaMA-Factory.

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...models.batch import inputs_once
from ..bypass import is_overridden
from ..replacements import temporarily
from ..scored_rows import ScoredRows, equal_when_merged, label_mask, masked_mean, merged, parts_of
from .line import INPUTS, FactoryLine, mean_logits_of

if TYPE_CHECKING:
    from llamafactory.train.kto.trainer import CustomKTOTrainer

_PREFIXES = ("", "kl_")
_KNOWN = {"kto_tags", *(f"{prefix}{name}" for prefix in _PREFIXES for name in INPUTS)}


class FactoryKTOLine(FactoryLine):
    class_name = "CustomKTOTrainer"
    relies_on = ("forward", "concatenated_forward", ":get_batch_logps", "get_batch_loss_metrics")
    replaced = ("concatenated_forward", "forward", "log")

    def concatenated_forward(
        self, stock: Callable, trainer: CustomKTOTrainer, model: nn.Module, batch: dict[str, Tensor]
    ) -> Any:
        if torch.is_grad_enabled():
            return stock(trainer, model, batch)
        calls_by_itself = is_overridden(trainer, self.trainer_class(), ("forward",))
        outputs = {} if calls_by_itself else self._merged_outputs(trainer, model, batch)
        with temporarily(self.state_of(trainer), running=outputs):
            return stock(trainer, model, batch)

    def forward(
        self, stock: Callable, trainer: CustomKTOTrainer, model: nn.Module, batch: dict[str, Tensor], prefix: str = ""
    ) -> Any:
        state = self.state_of(trainer)
        output = state.running.get(prefix) if state.running else None
        if output is None:
            output = self.output_of(trainer, model, _rows(batch, prefix), batch.keys() - _KNOWN)
        if isinstance(output, ScoredRows):
            sums, means = output.sums(), output.sums() / output.counts()
            logits = means if output.mean_logits is None else output.mean_logits_of_rows()
            return logits.detach(), sums, means
        called = model if output is None else lambda **inputs: SimpleNamespace(logits=output.logits)
        logits, *logps = stock(trainer, called, batch, prefix)
        if state.has_fused:  # other batches are: log the same means for this one
            means = mean_logits_of(logits)
            mask = label_mask(batch[f"{prefix}labels"]).to(means.device)
            logits = masked_mean(means, mask, 1)
        return logits, *logps

    def _merged_outputs(self, trainer: CustomKTOTrainer, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        """By prefix, the parts of a model's output for the rows of a batch and those of its KL term.

        Empty if the model's calls fall back.
        """
        parts = [_rows(batch, prefix) for prefix in _PREFIXES]
        ids = [rows["input_ids"] for rows in parts]
        if batch.keys() - _KNOWN or not equal_when_merged(model, *ids):
            return {}
        tensors = tuple(x for rows in parts for x in rows.values())
        inputs = inputs_once(self.state_of(trainer), tensors, lambda: merged(*parts))
        output = self.output_of(trainer, model, inputs, set())
        return {} if output is None else dict(zip(_PREFIXES, parts_of(output, *ids), strict=True))


def _rows(batch: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: batch[f"{prefix}{name}"] for name in INPUTS}
