"""ms-swift's KTOTrainer, patched where it gives the model a batch and where it reads its logits.

`forward` makes two calls of a model, one for the completions and one for the KL term, which has each
prompt with the completion of another one. Rows with the same prompt share it within a call. Without
gradients, both are one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models import forward
from ...models.calls import counting_calls_as
from ...models.language_model import text_config
from ...models.state import MakeOutput, ScoredBatch
from ...models.wrapped import base_of
from ...reasons import Reason
from ..bypass import is_overridden
from ..line import TrainerState
from ..merged_rows import equal_when_merged, merged
from ..replacements import temporarily
from ..scored_rows import Inputs, ScoredRows
from .line import SwiftLine

_COMPLETIONS, _KL = "completion_", "KL_completion_"
"""What the names of the entries of a batch begin with."""
_ROWS = ("input_ids", "attention_mask", "labels")

_PARAMETERS = {
    "forward": ["self", "model", "batch"],
    "_get_model_kwargs": ["self", "inputs", "prefix"],
    "_compute_kl_logps": ["self", "model", "batch"],
    "get_batch_logps": ["self", "inputs", "logits", "labels"],
}


@dataclass(eq=False, kw_only=True)
class _KTOState(TrainerState):
    inputs: dict[str, Inputs] | None = None  # by the kind of batch, while `KTOTrainer.forward` scores them


class _Output(NamedTuple):
    """A model's output, with the names that ms-swift reads."""

    logits: ScoredRows | Tensor
    aux_loss: Tensor | None


class _BothScored:
    """Takes the place of a model that has been called once for both kinds of rows of a batch.

    Args:
        model: the model.
        inputs: its inputs, by the prefix of their kind.

    Attributes:
        KL_logits: what takes the place of the logits of the rows of the KL term, or their logits.
    """

    def __init__(self, model: Any, inputs: Mapping[str, Any]):
        completions, KL = inputs[_COMPLETIONS], inputs[_KL]
        rows = merged({name: completions[name] for name in _ROWS}, KL)
        logits = model(**{**completions, **rows}, fused_lm_head=True).logits
        R, L = completions["input_ids"].shape
        self._output = _Output(_rows_of(logits, slice(R), L), None)
        self.KL_logits = _rows_of(logits, slice(R, None), KL["input_ids"].shape[1])

    def __call__(self, **kwargs: Any) -> _Output:
        return self._output


class SwiftKTOLine(SwiftLine):
    parameters = _PARAMETERS
    path = ("get_batch_loss_metrics", "forward", "_get_model_kwargs")
    groups = "prompts"

    def new_state(self) -> _KTOState:
        return _KTOState(name=self.name)

    def make_output(self, model: Any) -> MakeOutput:
        return functools.partial(_make_output, text_config(model))

    def replace(self) -> None:
        self.wrap("forward", self.score_both)
        self.wrap("_get_model_kwargs", self.model_kwargs)
        self.wrap("_compute_kl_logps", self.kl_logps)
        self.wrap("get_batch_logps", self.batch_logps)

    def score_both(self, stock: Callable, trainer: Any, model: Any, batch: dict[str, Any]) -> Any:
        if not self.calls(trainer, model):  # created before patch()
            return stock(trainer, model, batch)
        prefixes = (prefix for prefix in (_COMPLETIONS, _KL) if f"{prefix}labels" in batch)
        inputs = {prefix: self._inputs_of_kind(trainer, model, batch, prefix) for prefix in prefixes}
        reason = next((x for x in inputs.values() if isinstance(x, Reason)), None)
        if is_overridden(trainer, self.trainer_class(), ("get_batch_logps",)):
            reason = Reason("may-read-logits", function=f"{type(trainer).__name__}.get_batch_logps")
        if reason is not None:
            forward.record_fallback(model, self.name, reason)
            return stock(trainer, model, batch)
        state = self.state_of(trainer)
        state.inputs = inputs
        try:
            both = _BothScored(model, inputs) if self._merges(trainer, model, inputs) else model
            return stock(trainer, both, batch)
        finally:
            state.inputs = None

    def model_kwargs(self, stock: Callable, trainer: Any, inputs: dict[str, Any], prefix: str) -> Any:
        state = self.state_of(trainer)
        if state is None or state.inputs is None:
            return stock(trainer, inputs, prefix)
        rows = state.inputs[prefix]
        return {**rows, "fused_lm_head": True}, rows["labels"]

    def kl_logps(self, stock: Callable, trainer: Any, model: Any, batch: dict[str, Any]) -> Any:
        """Without a gradient, but called with gradients enabled for the policy in a training step only."""
        if isinstance(model, _BothScored):
            kwargs, labels = trainer._get_model_kwargs(batch, _KL)
            return trainer.get_batch_logps(kwargs, model.KL_logits, labels)[0]
        with counting_calls_as("policy") if torch.is_grad_enabled() else nullcontext():
            return stock(trainer, model, batch)

    def batch_logps(self, stock: Callable, trainer: Any, inputs: dict[str, Any], logits: Any, labels: Tensor) -> Any:
        if isinstance(logits, ScoredRows):
            logps = logits.sums()
            if logits.mean_logits is None:  # of the reference
                return logps, torch.zeros_like(logps)
            head: Any = base_of(trainer.model, self.name).get_output_embeddings()
            return logps, logits.mean_logits.sum(1) * head.out_features
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
        return self.inputs_of(trainer, part, model, kind=prefix, router_logits=False)


def _rows_of(logits: ScoredRows | Tensor, rows: slice, L: int) -> ScoredRows | Tensor:
    """Some rows of a batch, cut to L tokens each."""
    return logits.rows(rows, L - 1) if isinstance(logits, ScoredRows) else logits[rows, :L]


def _make_output(config: Any, scored: ScoredBatch, kwargs: dict) -> _Output:
    rows = ScoredRows.of(config, scored)
    return _Output(rows, rows.aux_loss)
