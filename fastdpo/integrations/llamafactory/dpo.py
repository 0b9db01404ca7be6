"""LLaMA-Factory's DPOTrainer, patched where it scores a batch, in `concatenated_forward`.

Its losses (DPO and its variants, ORPO and SimPO) are computed from the same log-probabilities by
its own functions.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without LLaMA-Factory.

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...reasons import Reason
from ..protocol import PatchOptions
from .scoring import INPUTS, ScoringLine, mean_logits_of, scored_tokens

if TYPE_CHECKING:
    from llamafactory.train.dpo.trainer import CustomDPOTrainer

_AVERAGED = ("ipo", "orpo", "simpo")
"""The losses of mean log-probabilities."""

_LOGITS = ("chosen_logits", "rejected_logits")
_PATH = ("get_batch_loss_metrics", "concatenated_forward")
_line = ScoringLine(
    "llamafactory.DPOTrainer", "content", _PATH, {"concatenated_forward": ["self", "model", "batch", "is_ref_model"]}
)


def unsupported_reason() -> Reason | None:
    from llamafactory.extras.misc import is_env_enabled

    if is_env_enabled("USE_MCA"):
        return Reason("use-mca")
    return _line.unsupported_reason(trainer_class())


def trainer_class() -> type[CustomDPOTrainer]:
    from llamafactory.train.dpo.trainer import CustomDPOTrainer

    return CustomDPOTrainer


def enable(options: PatchOptions) -> None:
    stock = trainer_class()
    stock_forward = stock.concatenated_forward

    @functools.wraps(stock_forward)
    def concatenated_forward(self, model, batch, is_ref_model=False):
        labels = batch["labels"]  # which stock removes from the batch
        output = _line.output_of(self, model, batch, batch.keys() - {*INPUTS})
        if output is not None and "log_probs" in output:
            return _results(self, labels, output, is_ref_model)
        called = model if output is None else lambda **inputs: output
        results = stock_forward(self, called, batch, is_ref_model)
        state = _line.state_of(self)
        if state is not None and state.has_fused:  # other batches are: log the same means for this one
            results |= _logits(labels, mean_logits_of(torch.cat([results[name] for name in _LOGITS])))
        return results

    _line.enable(stock, options)
    _line.replacements.put(stock, "concatenated_forward", concatenated_forward)


def disable() -> None:
    _line.disable()


def _results(
    trainer: CustomDPOTrainer, labels: Tensor, output: dict[str, Tensor], is_ref_model: bool
) -> dict[str, Any]:
    """The return value of LLaMA-Factory, from log-probabilities [2B, L-1]. Of the logits, it has one
    mean for each scored token of a completion.
    """
    logps = output["log_probs"]
    scored = scored_tokens(labels, logps)
    lengths = scored.sum(1)
    n = len(labels) // 2
    if trainer.ld_alpha is not None and not is_ref_model:  # LD-DPO, arXiv 2409.06411
        common = torch.minimum(lengths[:n], lengths[n:]).repeat(2)
        end = scored.int().argmax(1) + common
        position = torch.arange(logps.shape[1], device=logps.device)
        logps = logps * torch.where(position < end[:, None], 1.0, trainer.ld_alpha)
    sums = logps.sum(1)
    if trainer.loss_type in _AVERAGED:
        sums = means = sums / lengths
    else:
        means = sums / lengths
    results = {"chosen_logps": sums[:n], "rejected_logps": sums[n:], "chosen_logps_avg": means[:n]}
    return results | (_logits(labels, output["mean_logits"]) if "mean_logits" in output else dict.fromkeys(_LOGITS))


def _logits(labels: Tensor, mean_logits: Tensor) -> dict[str, Tensor]:
    """The means [2B, L-1] of the logits at the scored tokens of the chosen and of the rejected completions."""
    halves = zip(mean_logits.chunk(2), scored_tokens(labels, mean_logits).chunk(2), strict=True)
    return {name: logits[scored] for name, (logits, scored) in zip(_LOGITS, halves, strict=True)}
