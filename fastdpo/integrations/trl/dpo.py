"""TRL's DPOTrainer since its rewrite in TRL 0.29.

Since TRL 1.15 it prepares its models by `add_fused_lm_head`; `dpo_logits.py` has the versions before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, cast

from ...logs import warn
from ...models import forward
from ...models.batch import labels_from
from ...models.calls import counting_calls_as
from ...reasons import Reason
from ..admission import evidence
from ..admission.evidence import field_difference, signature_difference
from ..collating import REPLACED, with_packed_batches
from ..line import TrainerLine, arguments_of
from ..lines import DPO
from ..replacements import temporarily
from . import precompute
from .fused_head import FusedHeadLine
from .gathering import of_all_ranks
from .max_tokens.token_budget import RELIES_ON, TokenBudget

DPOTrainer = Any  # of one of several versions

PARAMETERS = {
    "_precompute_ref_logps": ["self", "dataset", "name", "batch_size"],
    "_compute_loss": ["self", "model", "inputs", "return_outputs"],
}
_PARAMETERS = {"compute_ref_log_probs": ["self", "model", "inputs"], **PARAMETERS}
_INIT_PARAMETERS = [
    *("self", "model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    *("compute_metrics", "callbacks", "optimizers", "quantization_config", "peft_config"),
]
_COLLATOR_FIELDS = {"pad_token_id", "max_length", "truncation_mode", "pad_to_multiple_of", "return_tensors"}


class RewrittenDPOLine(TrainerLine):
    """What the lines of these DPOTrainers share."""

    replaced = ("_compute_loss", *REPLACED, "compute_ref_log_probs", "_precompute_ref_logps")

    def replace(self) -> None:
        super().replace()
        # Which TRL runs its references in, of a policy with virtual tokens as well, where no adapter tells them apart.
        self.replacements.wrap(self.module(), "disable_gradient_checkpointing", _as_reference)

    def scoring(self, trainer: DPOTrainer, inputs: dict[str, Any], wants_output: bool) -> AbstractContextManager[None]:
        """A context in which TRL's code scores a batch.

        Args:
            trainer: the trainer, which may have no state.
            inputs: the batch.
            wants_output: whether the caller wants the output of the model.
        """
        return nullcontext()

    def get_train_dataloader(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> Any:
        """With batches that are packed for the labels that `_compute_loss` makes of them, if it was tested."""
        if not evidence.is_tested(self.trainer_class()._compute_loss):
            return stock(trainer, *args, **kwargs)
        return with_packed_batches(self, stock, trainer, *args, **kwargs)

    def compute_ref_log_probs(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> Any:
        inputs = arguments_of(stock, trainer, *args, **kwargs)["inputs"]  # TRL before 1.9 does not pass the model
        with counting_calls_as("reference"), self.scoring(trainer, inputs, False):
            return stock(trainer, *args, **kwargs)

    def _precompute_ref_logps(
        self, stock: Callable, trainer: DPOTrainer, dataset: Any, name: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not precompute.is_supported(trainer, dataset):
            return stock(trainer, dataset, name, batch_size, *args, **kwargs)
        return precompute.with_precomputed_logps(trainer, dataset, name, batch_size)

    def _compute_loss(
        self,
        stock: Callable,
        trainer: DPOTrainer,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool,
        *args: Any,  # of a newer TRL
        **kwargs: Any,
    ) -> Any:
        state = self.state_of(trainer)
        if state is None:
            return stock(trainer, model, inputs, return_outputs, *args, **kwargs)
        models = (x for x in (model, trainer.ref_model) if x is not None)
        several = state.gather or trainer.accelerator.num_processes > 1
        source = inputs.get("completion_mask") if all(map(state.wrapping.passes_arguments_on, models)) else None
        with (
            labels_from(source, inputs["input_ids"]),
            of_all_ranks(trainer.accelerator, state.gather) if several else nullcontext(),
            self.scoring(trainer, inputs, return_outputs),
        ):
            return stock(trainer, model, inputs, return_outputs, *args, **kwargs)

    def init(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        if init_padded(stock, trainer, *args, **kwargs):
            trainer.padding_free = forward.is_fused(trainer.model)
            if not trainer.padding_free:
                warn(f"{DPO}: padding_free=True, but batches are padded for the reason logged above")
        if self.options.max_tokens is not None and self.state_of(trainer) is not None:
            TokenBudget(self).install(trainer)


@contextmanager
def _as_reference(stock: Callable, *args: Any, **kwargs: Any) -> Iterator[None]:
    with counting_calls_as("reference"), stock(*args, **kwargs):
        yield


def init_padded(stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> bool:
    """Calls `__init__` without the option `padding_free`, of which TRL would warn. Returns whether it was given."""
    config = arguments_of(stock, trainer, *args, **kwargs).get("args")
    is_given = config is not None and config.padding_free
    with temporarily(config, padding_free=False) if is_given else nullcontext():
        stock(trainer, *args, **kwargs)
    return is_given


class DPOLine(RewrittenDPOLine, FusedHeadLine):
    parameters = _PARAMETERS
    relies_on = MappingProxyType({**FusedHeadLine.relies_on, "max_tokens": RELIES_ON})
    path = ("compute_loss", "_compute_loss", "fused_lm_head")
    images = True

    def unsupported_reason(self) -> Reason | None:
        collator = getattr(self.module(), "DataCollatorForPreference", None)
        return (
            super().unsupported_reason()
            or signature_difference(self.trainer_class(), "__init__", _INIT_PARAMETERS, exact=False)
            or signature_difference(collator, "torch_call", ["self", "examples"])
            or field_difference(cast(type, collator), _COLLATOR_FIELDS)
        )
