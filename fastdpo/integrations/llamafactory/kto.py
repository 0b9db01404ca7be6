"""LLaMA-Factory's KTOTrainer, patched where it scores rows, in `forward`.

For each batch, the trainer scores its completions and, for the KL term, the same prompts with other
completions. Where no gradient is needed, which is in the reference and in evaluations, both are
scored in one call, in which they share their prompts.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without LLaMA-Factory.

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...models.fallback import counting_calls_as
from ...reasons import Reason
from ..merged_rows import equal_when_merged, merged
from ..protocol import PatchOptions
from .scoring import INPUTS, ScoringLine, ScoringState, mean_logits_of, scored_tokens

if TYPE_CHECKING:
    from llamafactory.train.kto.trainer import CustomKTOTrainer

_PREFIXES = ("", "kl_")
_KNOWN = {"kto_tags", *(f"{prefix}{name}" for prefix in _PREFIXES for name in INPUTS)}

_PATH = ("get_batch_loss_metrics", "concatenated_forward", "forward")
_line = ScoringLine(
    "llamafactory.KTOTrainer",
    "prompts",
    _PATH,
    {"concatenated_forward": ["self", "model", "batch"], "forward": ["self", "model", "batch", "prefix"]},
)


def unsupported_reason() -> Reason | None:
    return _line.unsupported_reason(trainer_class())


def trainer_class() -> type[CustomKTOTrainer]:
    from llamafactory.train.kto.trainer import CustomKTOTrainer

    return CustomKTOTrainer


def enable(options: PatchOptions) -> None:
    stock = trainer_class()
    stock_concatenated, stock_forward = stock.concatenated_forward, stock.forward

    @functools.wraps(stock_concatenated)
    def concatenated_forward(self, model, batch):
        state = _line.state_of(self)
        if state is None:
            return stock_concatenated(self, model, batch)
        if torch.is_grad_enabled():
            with counting_calls_as("policy"):  # the KL term's call has no gradients
                return stock_concatenated(self, model, batch)
        if type(self).forward is forward:  # not a subclass's, which may call the model by itself
            state.outputs = _merged_outputs(self, state, model, batch)
        try:
            return stock_concatenated(self, model, batch)
        finally:
            state.outputs = {}

    @functools.wraps(stock_forward)
    def forward(self, model, batch, prefix=""):
        state = _line.state_of(self)
        output = None if state is None else state.outputs.get(prefix)
        if output is None:
            output = _line.output_of(self, model, _rows(batch, prefix), batch.keys() - _KNOWN)
        labels = batch[f"{prefix}labels"]
        if output is not None and "log_probs" in output:
            logps = output["log_probs"]
            sums, lengths = logps.sum(1), scored_tokens(labels, logps).sum(1)
            return _logits(labels, output.get("mean_logits", logps)), sums, sums / lengths
        called = model if output is None else lambda **inputs: SimpleNamespace(logits=output["logits"])
        logits, *logps = stock_forward(self, called, batch, prefix)
        if state is not None and state.has_fused:  # other batches are: log the same means for this one
            logits = _logits(labels, mean_logits_of(logits))
        return logits, *logps

    _line.enable(stock, options)
    _line.replacements.put(stock, "concatenated_forward", concatenated_forward)
    _line.replacements.put(stock, "forward", forward)


def disable() -> None:
    _line.disable()


def _rows(batch: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: batch[f"{prefix}{name}"] for name in INPUTS}


def _merged_outputs(
    trainer: CustomKTOTrainer, state: ScoringState, model: nn.Module, batch: dict[str, Tensor]
) -> dict[str, Any]:
    """By prefix, the parts of a model's output for the rows of a batch and those of its KL term.

    Empty if the model's calls fall back.
    """
    parts = [_rows(batch, prefix) for prefix in _PREFIXES]
    if batch.keys() - _KNOWN or not equal_when_merged(model, *(rows["input_ids"] for rows in parts)):
        return {}
    tensors = tuple(x for rows in parts for x in rows.values())
    inputs = state.merged.get(tensors, lambda: merged(*parts))
    output = _line.output_of(trainer, model, inputs, set())
    if output is None:
        return {}
    outputs: dict[str, Any] = {}
    start = 0
    for prefix in _PREFIXES:
        rows, width = batch[f"{prefix}labels"].shape
        columns = {"log_probs": width - 1, "mean_logits": width - 1, "logits": width}
        outputs[prefix] = {
            name: output[name][start : start + rows, :n] for name, n in columns.items() if name in output
        }
        start += rows
    return outputs


def _logits(labels: Tensor, mean_logits: Tensor) -> Tensor:
    """[R] the mean of the logits at the scored tokens of each row, from those of each token [R, L-1]."""
    scored = scored_tokens(labels, mean_logits)
    return (mean_logits.detach() * scored).sum(1) / scored.sum(1)
