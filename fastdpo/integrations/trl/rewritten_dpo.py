"""What the lines of TRL's DPOTrainer since its rewrite share: everything but where it scores a batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ...logs import warn
from ...models import forward, layouts
from ...models.calls import counting_calls_as
from ...models.wrapped import passes_arguments_on
from .. import evidence
from ..gathering import of_all_ranks
from ..line import TrainerLine, TrainerState, arguments_of
from ..lines import DPO
from ..replacements import temporarily
from . import precompute
from .batches.packed_where_collated import with_packed_batches
from .batches.prompt_groups import PromptGroups
from .batches.token_budget import TokenBudget
from .memory import ReferenceMemory
from .reference import reference_of

DPOTrainer = Any  # of one of several versions

PARAMETERS = {
    "_precompute_ref_logps": ["self", "dataset", "name", "batch_size"],
    "_compute_loss": ["self", "model", "inputs", "return_outputs"],
}


@dataclass(eq=False, kw_only=True)
class DPOState(TrainerState):
    memory: ReferenceMemory
    budget: TokenBudget | None = None
    prompt_groups: PromptGroups | None = None


class RewrittenDPOLine(TrainerLine):
    """What the lines of these DPOTrainers share."""

    def new_state(self) -> DPOState:
        return DPOState(name=self.name, memory=ReferenceMemory(self.options.reference_memory))

    def scoring(self, trainer: DPOTrainer, inputs: dict[str, Any], wants_output: bool) -> AbstractContextManager[None]:
        """A context in which TRL's code scores a batch.

        Args:
            trainer: the trainer, which may have no state.
            inputs: the batch.
            wants_output: whether the caller wants the output of the model.
        """
        return nullcontext()

    def replace(self) -> None:
        self.wrap("_compute_loss", self.compute_loss)
        self.wrap("get_train_dataloader", self.get_train_dataloader)
        self.wrap("compute_ref_log_probs", self.compute_ref_log_probs)
        self.wrap("_precompute_ref_logps", self.precompute_ref_logps)

    def get_train_dataloader(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> Any:
        return with_packed_batches(self, stock, trainer, *args, **kwargs)

    def compute_ref_log_probs(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> Any:
        inputs = arguments_of(stock, trainer, *args, **kwargs)["inputs"]  # TRL before 1.9 does not pass the model
        with counting_calls_as("reference"), self.scoring(trainer, inputs, False):
            return stock(trainer, *args, **kwargs)

    def precompute_ref_logps(
        self, stock: Callable, trainer: DPOTrainer, dataset: Any, name: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not precompute.is_supported(trainer, dataset):
            return stock(trainer, dataset, name, batch_size, *args, **kwargs)
        return precompute.with_precomputed_logps(trainer, dataset, name, batch_size)

    def compute_loss(
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
        gather = None if state.budget is None else state.budget.metrics.gather
        models = model, reference_of(trainer)
        is_known = evidence.is_tested(stock) and all(map(passes_arguments_on, models))
        with (
            state.memory.serving(trainer, inputs) as inputs,
            of_all_ranks(trainer.accelerator, gather),
            self.scoring(trainer, inputs, return_outputs),
            layouts.labelling(inputs.get("completion_mask") if is_known else None),
        ):
            return stock(trainer, model, inputs, return_outputs, *args, **kwargs)

    def init(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        config = arguments_of(stock, trainer, *args, **kwargs).get("args")
        if config is None or not config.padding_free:
            stock(trainer, *args, **kwargs)
            return
        with temporarily(config, padding_free=False):  # otherwise TRL would warn that it pads
            stock(trainer, *args, **kwargs)
        trainer.padding_free = forward.is_fused(trainer.model)
        if not trainer.padding_free:
            warn(f"{DPO}: padding_free=True, but batches are padded for the reason logged above")

    def prepare(self, trainer: DPOTrainer) -> None:
        super().prepare(trainer)
        state, options = self.state_of(trainer), self.options
        if state is not None and state.prompt_groups is None and options.group_prompts:
            state.prompt_groups = PromptGroups(whole_steps=options.max_tokens is not None)
            state.prompt_groups.install(trainer)
        if state is not None and state.budget is None and options.max_tokens is not None:
            state.budget = TokenBudget(options.max_tokens, options.share_prompts, options.group_prompts)
            state.budget.install(trainer)
