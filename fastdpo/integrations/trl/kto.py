"""TRL's KTOTrainer, which prepares its models by `add_fused_lm_head`.

For the loss "kto", TRL estimates a KL term from each prompt with the completion of another one, so
that a step makes four calls: policy and reference, each for the completions and for the KL term.
Here the reference has one call for both, in which they share their prompts.

With `patch(max_tokens=...)`, the loss of a row depends on its own tokens, on its label, and in the loss "kto" on a KL
term. That is one number for each batch that TRL has cut, at the same position of the step on all ranks: the mean of
the differences between policy and reference over the rows of its column `KL_completion_ids`, without gradients and not
below 0. TRL fills this column while it prepares the dataset, in the order of which it then trains. So a row may be
trained on in any micro-batch of its step if its KL term remains that of TRL's batch, and it takes its row of the KL
term along, which shares its prompt. It may not move to another step.

For this, all passes without gradients come first: the policy for the rows of the KL term, and the reference. The KL
terms of TRL's batches are computed from them as TRL does. A row then is trained on with the log-probability of its
reference raised by its KL term, since the loss depends on no more than the difference of the two from that of the
policy. `apo_zero_unpaired` has no KL term.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...models.batch import labels_from
from ...models.calls import counting_calls_as
from ..bypass import is_overridden
from ..replacements import temporarily
from ..scored_rows import equal_when_merged, merged
from .fused_head import FusedHeadLine
from .gathering import in_float32
from .max_tokens.budget import STEPS, Budget
from .max_tokens.steps import Batch, on_device
from .models import reference_of

if TYPE_CHECKING:
    from trl.trainer.kto_trainer import KTOTrainer

_LOSS = ("_compute_loss", "compute_ref_log_probs", "_compute_kl_logps")
_ROWS = ("input_ids", "attention_mask", "completion_mask")
_KL_ROWS = tuple(f"KL_{name}" for name in _ROWS)
_INPUTS = {*_ROWS, *_KL_ROWS, "label"}


@dataclass(kw_only=True, eq=False)
class KTOBudget(Budget):
    """How steps are cut."""

    def reason_on_ranks(self, trainer: KTOTrainer) -> str | None:
        return "KL terms, which ranks gather before the losses that need them" if trainer.calculate_KL else None

    def score_without_gradients(
        self, trainer: Any, model: nn.Module, batches: list[Batch], joined: Batch, micro_batches: list[Tensor]
    ) -> None:
        """Adds the log-probabilities of the passes without gradients to the batches, and to the joined rows those of
        the reference, raised by the KL terms.
        """
        of_rows = [self._without_gradients(trainer, model, joined, units) for units in micro_batches]
        places = torch.cat(micro_batches).argsort()
        known = {name: torch.cat([x[name] for x in of_rows])[places] for name in of_rows[0]}
        sizes, raised = [*map(self.size, batches)], []
        for batch, *of_batch in zip(batches, *(x.split(sizes) for x in known.values()), strict=True):
            batch |= dict(zip(known, of_batch, strict=True))
            raised.append(batch["ref_logps"] + kl_term(trainer, batch))
        for name in _KL_ROWS:
            joined.pop(name, None)
        joined.pop("ref_KL_logps", None)
        joined["ref_logps"] = torch.cat(raised)  # on the device, as all that is computed

    def _without_gradients(self, trainer: Any, model: nn.Module, joined: Batch, units: Tensor) -> dict[str, Tensor]:
        """The log-probabilities of rows by the reference, and of their rows of the KL term by both, [R] each."""
        batch = on_device(self.picked(trainer, joined, units), trainer.accelerator.device)
        known: Batch = {name: batch.pop(name) for name in ("ref_logps", "ref_KL_logps") if name in batch}
        if not known:
            logps = trainer.compute_ref_log_probs(reference_of(trainer), batch)
            known = dict(zip(("ref_logps", "ref_KL_logps"), logps, strict=True))
        with trainer.compute_loss_context_manager():
            known["KL_logps"] = trainer._compute_kl_logps(model, batch)
        return {name: x for name, x in known.items() if x is not None}

    def training(self, trainer: Any) -> AbstractContextManager[object]:
        """The log-probabilities of the reference are those of the batch, with the KL terms."""
        return temporarily(trainer, precompute_ref_logps=True, calculate_KL=False)

    def computing_metrics(self, trainer: Any) -> AbstractContextManager[object]:
        return temporarily(
            trainer, precompute_ref_logps=True, _compute_kl_logps=lambda model, batch: batch.get("KL_logps")
        )


class KTOLine(FusedHeadLine):
    parameters = MappingProxyType({"_compute_kl_logps": ["self", "model", "batch"]})
    replaced = ("compute_ref_log_probs", "_compute_loss")
    cutting = KTOBudget(
        relies_on=(*STEPS, *_LOSS, ":DataCollatorForUnpairedPreference.torch_call"),
        entries=frozenset({*_INPUTS, "ref_logps", "ref_KL_logps"}),
        fields=("log_probs", "entropy", "mean_logits"),
    )

    def compute_ref_log_probs(
        self, stock: Callable, trainer: KTOTrainer, model: Any, inputs: dict, *args: Any, **kwargs: Any
    ) -> Any:
        with counting_calls_as("reference"):
            if self.is_newer or not _merges(trainer, model, inputs):
                return stock(trainer, model, inputs, *args, **kwargs)
            with temporarily(trainer, calculate_KL=False):
                rows = ({name: inputs[f"{prefix}{name}"] for name in _ROWS} for prefix in ("", "KL_"))
                logps, _ = stock(trainer, model, merged(*rows))  # [2B, max(L1, L2)], those of the KL term last
        completion_logps, KL_logps = logps.chunk(2)
        return completion_logps, KL_logps

    def _compute_loss(
        self,
        stock: Callable,
        trainer: KTOTrainer,
        model: Any,
        inputs: dict,
        return_outputs: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        called = self.noting(trainer, model)
        with in_float32(trainer.accelerator):
            if called is not model:  # while a step is cut
                with labels_from(inputs["completion_mask"], inputs["input_ids"]):
                    return stock(trainer, called, inputs, return_outputs, *args, **kwargs)
            reference = reference_of(trainer)
            overridden = is_overridden(trainer, self.trainer_class(), ("compute_ref_log_probs", "_compute_kl_logps"))
            calls_twice = trainer.precompute_ref_logps or self.is_newer or overridden
            if calls_twice or not _merges(trainer, reference, inputs):
                return stock(trainer, model, inputs, return_outputs, *args, **kwargs)
            logps, KL_logps = trainer.compute_ref_log_probs(reference, inputs)
            with temporarily(trainer, precompute_ref_logps=True):  # TRL then takes them from the batch
                return stock(trainer, model, {**inputs, "ref_logps": logps, "ref_KL_logps": KL_logps}, return_outputs)


def _merges(trainer: KTOTrainer, reference: Any, inputs: dict[str, Any]) -> bool:
    """Whether the two calls of the reference for a batch can be one fused call with equal results."""
    if not trainer.calculate_KL:
        return False
    if not {name for name, x in inputs.items() if x is not None} <= _INPUTS:
        return False
    return equal_when_merged(reference, inputs["input_ids"], inputs["KL_input_ids"])


def kl_term(trainer: Any, batch: Batch) -> Tensor | float:
    """The KL term of a batch as TRL computes it, with the batches of the other ranks at its position of the step."""
    if not trainer.calculate_KL:
        return 0.0
    mean = (batch["KL_logps"] - batch["ref_KL_logps"]).mean()
    return trainer.accelerator.gather_for_metrics(mean).mean().clamp(min=0)
