"""TRL's DPOTrainer before its rewrite, patched where it scores a batch, in `concatenated_forward`.

Training, evaluation, the reference and precomputing all call it. What TRL computes from logits is
computed here from per-token results in the same way, including its peculiarities: `ld_alpha` counts
positions from the beginning of a row, and `use_weighting` multiplies a token's log-probability by the
next token's weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...logs import warn
from ...models import forward
from ...models.batch import inputs_once
from ...models.calls import counting_calls_as
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..line import TrainerLine
from ..options import liger_reason
from ..replacements import temporarily
from ..scored_rows import Inputs, ScoredRows, score
from .dpo import DPOTrainer, padded
from .gathering import of_all_ranks

_OTHER_INPUTS = ("pixel_values", "pixel_attention_mask", "image_sizes", "token_type_ids")


class LegacyDPOLine(TrainerLine):
    parameters = MappingProxyType(
        {
            "concatenated_inputs": ["batch", "padding_value"],
            ":flush_left": ["mask", "..."],
            ":flush_right": ["mask", "..."],
        }
    )
    replaced = ("concatenated_forward", "get_batch_loss_metrics")

    def prepared_reason(self, trainer: DPOTrainer) -> Reason | None:
        return liger_reason(trainer.args)

    def statistics(self, trainer: DPOTrainer) -> tuple[str, ...]:
        return ("mean_logits", *(("log_sum_sq_probs",) if trainer.use_weighting else ()))

    def replace(self) -> None:
        if self.options.max_tokens not in (None, "own"):
            warn(f"{self.name}: max_tokens requires TRL 1.8 or later")
        super().replace()

    def init(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        with padded(stock, trainer, *args, **kwargs) as is_padding_free:
            stock(trainer, *args, **kwargs)
        if is_padding_free:
            self.prepare(trainer)
            trainer.padding_free = True
            if not forward.is_fused(trainer.model):
                warn(f"{self.name}: padding_free=True falls back to TRL for the reason logged above")

    def concatenated_forward(
        self, stock: Callable, trainer: DPOTrainer, model: Any, batch: dict[str, Any], is_ref_model: bool = False
    ) -> dict[str, Tensor]:
        if not self.fuses(trainer, model):
            return stock(trainer, model, batch, is_ref_model)

        def from_logits(of_model):
            padded = of_model is not model  # the batch that has been run
            with temporarily(trainer, padding_free=False) if padded else nullcontext():
                return stock(trainer, of_model, batch, is_ref_model)

        tensors = tuple(x for x in batch.values() if isinstance(x, Tensor))  # the same for policy and reference
        inputs = inputs_once(self.state_of(trainer), tensors, lambda: inputs_of(trainer, batch))
        results = functools.partial(results_of, trainer, is_ref_model, cast(Inputs, inputs))
        with counting_calls_as("reference") if is_ref_model else nullcontext():
            return score(model, self.name, inputs, results, from_logits)

    def get_batch_loss_metrics(
        self, stock: Callable, trainer: DPOTrainer, model: Any, batch: dict[str, Any], train_eval: str = "train"
    ) -> Any:
        with of_all_ranks(trainer.accelerator):
            return stock(trainer, model, batch, train_eval)


def inputs_of(trainer: DPOTrainer, batch: dict[str, Any]) -> Inputs | Reason:
    """Ids, mask and labels [2B, L], aligned and truncated as in TRL; or the
    reason why the batch is unsupported.
    """
    from trl.trainer import dpo_trainer

    flush_left, flush_right = (getattr(dpo_trainer, name) for name in ("flush_left", "flush_right"))
    if trainer.is_encoder_decoder:
        return Reason("encoder-decoder", model="the model")
    other = [name for name in _OTHER_INPUTS if batch.get(name) is not None]
    if other:
        return Reason("batch-entries", names=", ".join(other))
    whole = trainer.concatenated_inputs(batch, padding_value=trainer.pad_token_id)
    ids, mask = (
        torch.cat([whole[f"prompt_{name}"], whole[f"completion_{name}"]], dim=1)
        for name in ("input_ids", "attention_mask")
    )
    scored = torch.cat([torch.zeros_like(whole["prompt_attention_mask"]), whole["completion_attention_mask"]], dim=1)

    longest = mask.shape[1] if trainer.max_length is None else trainer.max_length
    truncated = longest < mask.shape[1]
    if truncated and trainer.truncation_mode == "keep_end":
        mask, ids, scored = (x[:, -longest:] for x in flush_right(mask, ids, scored))
    mask, ids, scored = flush_left(mask, ids, scored)
    if truncated:
        mask, ids, scored = (x[:, :longest] for x in (mask, ids, scored))
        if scored[:, 0].any():  # TRL counts a token there that nothing predicts
            return Reason("truncated-prompt")
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(scored == 0, IGNORE_INDEX),
        "use_cache": False,
        **({"output_router_logits": True} if trainer.aux_loss_enabled else {}),
    }


def results_of(trainer: DPOTrainer, is_ref_model: bool, inputs: Inputs, rows: ScoredRows) -> dict[str, Tensor]:
    """The return value of TRL. The first token of a row is never scored."""
    scored = inputs["labels"] != IGNORE_INDEX  # [2B, L]
    start = int(scored.any(0).int().argmax()) - 1 if trainer.use_logits_to_keep else 0  # of TRL's logits
    logps = F.pad(rows.logps, (1, 0))[:, start:]  # of each token from there
    tokens = ScoredRows(logps, scored[:, start:].to(logps.device))
    counts, sums = tokens.counts(), tokens.sums()
    n = len(sums) // 2
    results = {}

    if rows.log_sum_sq_probs is not None:  # arXiv 2406.11827, eq. 2
        with torch.no_grad():
            weights = ((F.pad(rows.logps, (1, -1)) - rows.log_sum_sq_probs) * rows.mask).sum(1) / counts
            results["policy_weights"] = (weights[:n] + weights[n:]).exp().clamp(max=1)
    if trainer.args.rpo_alpha is not None or "sft" in trainer.loss_type:
        is_zero = inputs["input_ids"][:, start:] == 0  # TRL ignores token 0
        results["nll_loss"] = tokens.within(~is_zero).rows(slice(n)).nll()
    if "ipo" in trainer.loss_type:
        sums = sums / counts
    if trainer.args.ld_alpha is not None and not is_ref_model:
        position = torch.arange(logps.shape[1], device=logps.device)
        weights = tokens.ld_weights(trainer.args.ld_alpha, position)
        sums = tokens.sums(weights * (position < counts[:, None]))

    results |= {"chosen_logps": sums[:n], "rejected_logps": sums[n:]}
    if rows.mean_logits is not None:
        chosen, rejected = rows.halves()
        results |= {"mean_chosen_logits": chosen.mean_logit(), "mean_rejected_logits": rejected.mean_logit()}
    if trainer.aux_loss_enabled:
        results["aux_loss"] = rows.aux_loss
    return results
