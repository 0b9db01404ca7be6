"""ms-swift's KTOTrainer, patched where it gives the model a batch and where it reads its logits.

`forward` makes two calls of a model, one for the completions and one for the KL term, which has each
prompt with the completion of another one. Rows with the same prompt share it within a call.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models import forward as fused_forward
from ...models.fallback import counting_calls_as
from ...models.forward import ScoredBatch
from ...models.router import router_loss
from ..concatenated import install
from ..deferred_metrics import is_overridden
from ..protocol import STATE, PatchOptions
from ..replacements import temporarily
from .line import SwiftLine

_PREFIXES = ("completion_", "KL_completion_")

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

    logits: _Scores
    aux_loss: Tensor | None


def enable(options: PatchOptions) -> None:
    trainer = trainer_class()
    stock_forward, stock_kwargs = trainer.forward, trainer._get_model_kwargs
    stock_kl, stock_logps = trainer._compute_kl_logps, trainer.get_batch_logps

    @functools.wraps(stock_forward)
    def forward(self, model, batch):
        if not _line.calls(self, model):  # created before patch()
            return stock_forward(self, model, batch)
        inputs = {prefix: _inputs_of(self, model, batch, prefix) for prefix in _PREFIXES if f"{prefix}labels" in batch}
        reason = next((x for x in inputs.values() if isinstance(x, str)), None)
        if is_overridden(self, trainer, ("get_batch_logps",)):
            reason = f"{type(self).__name__}.get_batch_logps may read logits"
        if reason is not None:
            fused_forward.record_fallback(model, _line.name, reason)
            return stock_forward(self, model, batch)
        state = vars(self)[STATE]
        state.inputs = inputs
        try:
            return stock_forward(self, model, batch)
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


def _inputs_of(trainer: Any, model: Any, batch: dict[str, Any], prefix: str) -> dict[str, Any] | str:
    part = {name.removeprefix(prefix): x for name, x in batch.items() if name.startswith(prefix)}
    return _line.inputs_of(trainer, part, model, kind=prefix, router_logits=False)  # `forward` asks for them


def _make_output(head: Any, config: Any, scored: ScoredBatch, kwargs: dict) -> _Output:
    logps, means = scored.logps.logps, scored.logps.mean_logits
    sums = None if means is None else means * head.out_features
    routed = scored.router_logits
    return _Output(_Scores(logps, sums), None if routed is None else router_loss(config, routed, scored.multiplicity))
