"""`patch(max_tokens=...)` for TRL's KTOTrainer.

What may move: the loss of a row depends on its own tokens, on its label, and in the loss "kto" on a KL term. That is
one number for each batch that TRL has cut, at the same position of the step on all ranks: the mean of the differences
between policy and reference over the rows of its column `KL_completion_ids`, without gradients and not below 0. TRL
fills this column while it prepares the dataset, in the order of which it then trains. So a row may be trained on in
any micro-batch of its step if its KL term remains that of TRL's batch, and it takes its row of the KL term along, which
shares its prompt. It may not move to another step.

For this, all passes without gradients come first: the policy for the rows of the KL term, and the reference. The KL
terms of TRL's batches are computed from them as TRL does. A row then is trained on with the log-probability of its
reference raised by its KL term, since the loss depends on no more than the difference of the two from that of the
policy. `apo_zero_unpaired` has no KL term.

The loss of a batch is the mean over its rows, and TRL multiplies those of desirable and undesirable rows by a weight
each. There it also enters how much a row weighs in a step whose last batch is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...replacements import replacing, temporarily
from ..reference import reference_of
from .row_budget import Batch, PaddedRowBudget, on_device

_OF_ROWS = ("input_ids", "attention_mask", "completion_mask")
_OF_KL = tuple(f"KL_{name}" for name in _OF_ROWS)


class KTOBudget(PaddedRowBudget):
    """Cuts the steps of one trainer."""

    functions = ("compute_loss", "_compute_loss", "_compute_kl_logps", "compute_ref_log_probs")
    entries = frozenset({*_OF_ROWS, *_OF_KL, "label", "ref_logps", "ref_KL_logps"})
    fields = ("log_probs", "entropy", "mean_logits")

    def unsupported_reason(self, trainer: Any) -> str | None:
        return None

    def prepare(
        self, trainer: Any, model: nn.Module, batches: list[Batch], joined: Batch, micro_batches: list[Tensor]
    ) -> None:
        """Adds the log-probabilities of the passes without gradients to the batches, and to the joined rows those of
        the reference, raised by the KL terms.
        """
        of_rows = [self._without_gradients(trainer, model, joined, rows) for rows in micro_batches]
        places = torch.cat(micro_batches).argsort()
        known = {name: torch.cat([x[name] for x in of_rows])[places] for name in of_rows[0]}
        sizes, raised = [len(batch["label"]) for batch in batches], []
        for batch, *of_batch in zip(batches, *(x.split(sizes) for x in known.values()), strict=True):
            batch |= dict(zip(known, of_batch, strict=True))
            raised.append(batch["ref_logps"] + kl_term(trainer, batch))
        for name in _OF_KL:
            joined.pop(name, None)
        joined.pop("ref_KL_logps", None)
        joined["ref_logps"] = torch.cat(raised)  # on the device, as all that is computed

    def _without_gradients(self, trainer: Any, model: nn.Module, joined: Batch, rows: Tensor) -> dict[str, Tensor]:
        """The log-probabilities of rows by the reference, and of their rows of the KL term by both, [R] each."""
        batch = on_device(self.picked(joined, rows), trainer.accelerator.device)
        known: Batch = {name: batch.pop(name) for name in ("ref_logps", "ref_KL_logps") if name in batch}
        if not known:
            logps = trainer.compute_ref_log_probs(reference_of(trainer), batch)
            known = dict(zip(("ref_logps", "ref_KL_logps"), logps, strict=True))
        with trainer.compute_loss_context_manager():
            known["KL_logps"] = trainer._compute_kl_logps(model, batch)
        return {name: x for name, x in known.items() if x is not None}

    def weighing(
        self, trainer: Any, batches: list[Batch], joined: Batch, rows: Tensor
    ) -> AbstractContextManager[object]:
        sizes = torch.tensor([len(x["label"]) for x in batches for _ in x["label"]], device="cpu")
        weights = len(rows) / (sizes[rows] * trainer.current_gradient_accumulation_steps)
        is_desirable = joined["label"][rows].bool()
        desirable, undesirable = (weights[x].to(joined["ref_logps"]) for x in (is_desirable, ~is_desirable))
        return temporarily(
            trainer,
            desirable_weight=trainer.desirable_weight * desirable,
            undesirable_weight=trainer.undesirable_weight * undesirable,
            current_gradient_accumulation_steps=1,
            precompute_ref_logps=True,  # those of the batch
            calculate_KL=False,
        )

    @contextmanager
    def computing_metrics(self, trainer: Any) -> Iterator[None]:
        known = replacing(trainer, _compute_kl_logps=lambda model, batch: batch.get("KL_logps"))
        with known, temporarily(trainer, precompute_ref_logps=True):
            yield


def kl_term(trainer: Any, batch: Batch) -> Tensor | float:
    """The KL term of a batch as TRL computes it, with the batches of the other ranks at its position of the step."""
    if not trainer.calculate_KL:
        return 0.0
    mean = (batch["KL_logps"] - batch["ref_KL_logps"]).mean()
    return trainer.accelerator.gather_for_metrics(mean).mean().clamp(min=0)
