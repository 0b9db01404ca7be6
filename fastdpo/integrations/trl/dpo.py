"""TRL's DPOTrainer since its rewrite in TRL 0.29.

Since TRL 1.15 it prepares its models by `add_fused_lm_head`; `dpo_logits.py` has the versions before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from ...data.columns import COLUMNS, REFERENCE_COLUMNS
from ...logs import NotFused, warn
from ...models import forward
from ...models.batch import labels_from
from ...models.calls import counting_calls_as
from ...models.ranks.sequence_group import SequenceGroup
from ...models.state import ForwardOptions
from ...reasons import Reason
from ..admission.signatures import arguments_of
from ..collating import REPLACED
from ..line import TrainerLine
from ..registry import DPO
from ..replacements import temporarily
from ..trainer_state import TrainerState
from . import context_parallel, precompute
from .fused_head import FusedHeadLine
from .gathering import of_all_ranks
from .max_tokens import dealing
from .max_tokens.budget import STEPS, Budget
from .max_tokens.steps import Batch
from .models import reference_logps

DPOTrainer = Any  # of one of several versions

RELIES_ON = (*STEPS, *dealing.RELIES_ON, "compute_loss", ":DataCollatorForPreference.torch_call")
"""The functions that `max_tokens` relies on in trainers of preferences (see `Budget.relies_on`)."""
NOT_A_MEAN_OVER_PAIRS = {"aot", "aot_unpaired", "sft"}
"""The values of `loss_type` with which a loss is not a mean over pairs."""


def uncuttable(trainer: DPOTrainer) -> str | None:
    """Why pairs of a trainer weigh another part of the loss in another batch, or None."""
    if not hasattr(trainer, "aux_loss_enabled"):
        return "TRL before 1.8"
    losses = NOT_A_MEAN_OVER_PAIRS & set(trainer.loss_types)
    return f"loss_type={sorted(losses)[0]!r}, which is not a mean over pairs" if losses else None


PAIRS: dict[str, Any] = dict(
    relies_on=(*RELIES_ON, "_compute_loss", "compute_ref_log_probs"),
    rows_of_unit=2,
    columns=COLUMNS,
    entries=frozenset({"input_ids", "attention_mask", "completion_mask", *REFERENCE_COLUMNS}),
    uncuttable=uncuttable,
)
"""How their steps are cut (see `Budget`)."""


class RewrittenDPOLine(TrainerLine):
    """What the lines of these DPOTrainers share."""

    options_rely_on: ClassVar = {"precompute_ref_log_probs": precompute.RELIES_ON}
    replaced = ("_compute_loss", *REPLACED, "_precompute_ref_logps", ":disable_gradient_checkpointing")

    @contextmanager
    def disable_gradient_checkpointing(self, stock: Callable, model: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """TRL runs its references in this context, also that of a policy with virtual tokens, which no adapter tells
        apart.
        """
        with counting_calls_as("reference"), stock(model, *args, **kwargs):
            yield

    def scoring(self, trainer: DPOTrainer, inputs: dict[str, Any], wants_output: bool) -> AbstractContextManager[None]:
        """A context in which TRL's code scores a batch.

        Args:
            trainer: the trainer, with a state.
            inputs: the batch.
            wants_output: whether the caller wants the output of the model.
        """
        return nullcontext()

    def packs_collated(self) -> bool:
        return not self.is_newer  # packed for the labels that a tested `_compute_loss` makes of a batch

    def _precompute_ref_logps(
        self, stock: Callable, trainer: DPOTrainer, dataset: Any, name: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not precompute.is_supported(trainer, dataset, self.changed_code(precompute.RELIES_ON)):
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
        models = [x for x in (model, trainer.ref_model) if x is not None]
        with (
            computing_loss(trainer, state, models, inputs),
            self.scoring(trainer, inputs, return_outputs),
            nullcontext(inputs) if state.budget is None else self._with_reference(trainer, inputs) as inputs,
        ):
            return stock(trainer, self.noting(trainer, model), inputs, return_outputs, *args, **kwargs)

    @contextmanager
    def _with_reference(self, trainer: DPOTrainer, inputs: Batch) -> Iterator[Batch]:
        """While a step is cut, yields a batch with the log-probabilities of the reference, which TRL takes from there
        during the block.
        """
        budget = self.state_of(trainer).budget
        if not budget.is_running or trainer.precompute_ref_logps:
            yield inputs
            return
        logps = budget.known or dict(zip(REFERENCE_COLUMNS, reference_logps(trainer, inputs), strict=True))
        logps = {name: logps[name] for name in REFERENCE_COLUMNS}
        budget.note(logps)
        with temporarily(trainer, precompute_ref_logps=True):
            yield {**inputs, **logps}

    def unused(self, trainer: DPOTrainer, reason: Reason) -> None:
        if trainer.padding_free:
            name = f"{DPO} ({type(trainer).__name__})"
            rule = "padding_free must be False, since its batches are padded; got True"
            raise NotFused(f"{name}: {rule}, and {reason.named}")
        super().unused(trainer, reason)

    def init(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        with padded(stock, trainer, *args, **kwargs) as is_padding_free:
            super().init(stock, trainer, *args, **kwargs)
        if is_padding_free:
            trainer.padding_free = forward.is_fused(trainer.model)
            if not trainer.padding_free:
                warn(f"{DPO}: padding_free=True, but batches are padded for the reason logged above")


@contextmanager
def computing_loss(trainer: Any, state: TrainerState, models: list[Any], inputs: dict[str, Any]) -> Iterator[None]:
    """In the block, TRL computes the loss of a batch: the labels of calls follow from its `completion_mask`, as far as
    the models are given what it passes on, and metrics are gathered from all ranks.
    """

    def passes() -> bool:  # a function may stand for a model
        return all(isinstance(x, nn.Module) and state.wrapping.passes_arguments_on(x) for x in models)

    with (
        labels_from(inputs.get("completion_mask"), inputs["input_ids"], passes),
        nullcontext() if trainer.accelerator.num_processes == 1 else of_all_ranks(trainer.accelerator),
    ):
        yield


@contextmanager
def padded(stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> Iterator[bool]:
    """In the block, the configuration of an `__init__` is without `padding_free`, of which TRL would warn. Yields
    whether it was given.
    """
    config = arguments_of(stock, trainer, *args, **kwargs).get("args")
    is_given = getattr(config, "padding_free", False)
    with temporarily(config, padding_free=False) if is_given else nullcontext():
        yield is_given


class DPOLine(RewrittenDPOLine, FusedHeadLine):
    parameters = MappingProxyType({"compute_ref_log_probs": ["self", "model", "inputs"]})
    images = True
    options_rely_on: ClassVar = {**RewrittenDPOLine.options_rely_on, "cp_size": context_parallel.RELIES_ON}
    cutting = Budget(**PAIRS, fields=("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs"))

    def request(self, trainer: DPOTrainer, role: str) -> ForwardOptions:
        return super().request(trainer, role)._replace(sequence_group=self._sequence_group())

    def prepare(self, trainer: DPOTrainer) -> None:
        super().prepare(trainer)
        state = self.state_of(trainer)
        if state is not None and self._sequence_group() is not None:
            context_parallel.install(trainer, state.undo)

    def packs_collated(self) -> bool:
        # The ranks of a group divide the tokens of a batch, which the collator does not.
        return super().packs_collated() and self._sequence_group() is None

    def _sequence_group(self) -> SequenceGroup | None:
        """The ranks that share each batch. None where accelerate has another way to do it than the tested one."""
        return None if self.changed_code(context_parallel.RELIES_ON) else context_parallel.sequence_group()
