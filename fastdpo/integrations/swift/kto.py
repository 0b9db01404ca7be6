"""ms-swift's KTOTrainer, patched where it gives the model a batch and where it reads its logits.

`forward` makes two calls of a model, one for the completions and one for the KL term, which has each
prompt with the completion of another one. Rows with the same prompt share it within a call. Without
gradients, both are one call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models import forward as fused_forward
from ...models.fallback import counting_calls_as
from ...models.forward import ScoredBatch
from ...models.router import router_loss
from ...reasons import Reason
from ..bypass import is_overridden
from ..concatenated import Inputs, install
from ..merged_rows import equal_when_merged, merged
from ..protocol import STATE, PatchOptions
from ..replacements import temporarily
from .line import SwiftLine

_COMPLETIONS, _KL = "completion_", "KL_completion_"
"""What the names of the entries of a batch begin with."""
_ROWS = ("input_ids", "attention_mask", "labels")

_line = SwiftLine(
    "KTOTrainer",
    path=("get_batch_loss_metrics", "forward", "_get_model_kwargs"),
    parameters={
        "forward": ["self", "model", "batch"],
        "_get_model_kwargs": ["self", "inputs", "prefix"],
        "_compute_kl_logps": ["self", "model", "batch"],
        "get_batch_logps": ["self", "inputs", "logits", "labels"],
    },
)
trainer_class = _line.trainer_class
unsupported_reason = _line.unsupported_reason
disable = _line.disable


class _Scores(NamedTuple):
    """What takes the place of logits.

    Attributes:
        logps: of the token after each position, [R, L-1], zero where nothing is scored.
        sums: of the logits over the vocabulary, likewise; None for the reference.
    """

    logps: Tensor
    sums: Tensor | None


class _Output(NamedTuple):
    """A model's output, with the names that ms-swift reads."""

    logits: _Scores | Tensor
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


def enable(options: PatchOptions) -> None:
    trainer = trainer_class()
    stock_forward, stock_kwargs = trainer.forward, trainer._get_model_kwargs
    stock_kl, stock_logps = trainer._compute_kl_logps, trainer.get_batch_logps

    def merges(self, model):
        """Whether the two calls for a batch are one fused call with equal results."""
        if torch.is_grad_enabled() or not self.calculate_KL or self.aux_loss_enabled:
            return False
        if is_overridden(self, trainer, ("_compute_kl_logps", "_get_model_kwargs")):
            return False
        inputs = vars(self)[STATE].inputs
        return equal_when_merged(model, inputs[_COMPLETIONS]["input_ids"], inputs[_KL]["input_ids"])

    @functools.wraps(stock_forward)
    def forward(self, model, batch):
        if not _line.calls(self, model):  # created before patch()
            return stock_forward(self, model, batch)
        prefixes = (prefix for prefix in (_COMPLETIONS, _KL) if f"{prefix}labels" in batch)
        inputs = {prefix: _inputs_of(self, model, batch, prefix) for prefix in prefixes}
        reason = next((x for x in inputs.values() if isinstance(x, Reason)), None)
        if is_overridden(self, trainer, ("get_batch_logps",)):
            reason = Reason("may-read-logits", function=f"{type(self).__name__}.get_batch_logps")
        if reason is not None:
            fused_forward.record_fallback(model, _line.name, reason)
            return stock_forward(self, model, batch)
        state = vars(self)[STATE]
        state.inputs = inputs
        try:
            return stock_forward(self, _BothScored(model, inputs) if merges(self, model) else model, batch)
        finally:
            state.inputs = None

    @functools.wraps(stock_kwargs)
    def _get_model_kwargs(self, inputs, prefix):
        state = vars(self).get(STATE)
        if state is None or state.inputs is None:
            return stock_kwargs(self, inputs, prefix)
        rows = state.inputs[prefix]
        return {**rows, "fused_lm_head": True}, rows["labels"]

    @functools.wraps(stock_kl)
    def _compute_kl_logps(self, model, batch):
        """Without a gradient, but called with gradients enabled for the policy in a training step only."""
        if isinstance(model, _BothScored):
            kwargs, labels = self._get_model_kwargs(batch, _KL)
            return self.get_batch_logps(kwargs, model.KL_logits, labels)[0]
        with counting_calls_as("policy") if torch.is_grad_enabled() else nullcontext():
            return stock_kl(self, model, batch)

    @functools.wraps(stock_logps)
    def get_batch_logps(self, inputs, logits, labels):
        if isinstance(logits, _Scores):
            logps = logits.logps.sum(1)
            return logps, torch.zeros_like(logps) if logits.sums is None else logits.sums.sum(1)
        # If the call fell back, the logits are those of padded rows.
        with temporarily(self.template, padding_free=False) if "fused_lm_head" in inputs else nullcontext():
            return stock_logps(self, inputs, logits, labels)

    def install_on(trainer: Any, models: list) -> None:
        for role, model in models:
            make_output = functools.partial(_make_output, model.get_output_embeddings())
            install([(role, model)], _line.name, options, groups="prompts", make_output=make_output)

    _line.watch(install_on)
    _line.replacements.put(trainer, "forward", forward)
    _line.replacements.put(trainer, "_get_model_kwargs", _get_model_kwargs)
    _line.replacements.put(trainer, "_compute_kl_logps", _compute_kl_logps)
    _line.replacements.put(trainer, "get_batch_logps", get_batch_logps)


def _rows_of(logits: _Scores | Tensor, rows: slice, L: int) -> _Scores | Tensor:
    """Some rows of a batch, cut to L tokens each."""
    if isinstance(logits, _Scores):
        sums = logits.sums
        return _Scores(logits.logps[rows, : L - 1], None if sums is None else sums[rows, : L - 1])
    return logits[rows, :L]


def _inputs_of(trainer: Any, model: Any, batch: dict[str, Any], prefix: str) -> Inputs | Reason:
    part = {name.removeprefix(prefix): x for name, x in batch.items() if name.startswith(prefix)}
    return _line.inputs_of(trainer, part, model, kind=prefix, router_logits=False)  # `forward` asks for them


def _make_output(head: Any, config: Any, scored: ScoredBatch, kwargs: dict) -> _Output:
    logps, means = scored.logps.logps, scored.logps.mean_logits
    sums = None if means is None else means * head.out_features
    routed = scored.router_logits
    return _Output(_Scores(logps, sums), None if routed is None else router_loss(config, routed, scored.multiplicity))
