"""What the lines of TRL's DPOTrainer since its rewrite share: everything but where it scores a batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ...logs import warn
from ...models import forward
from ...models.fallback import counting_calls_as
from ...reasons import Reason
from ..gathering import of_all_ranks
from ..protocol import PatchOptions
from ..replacements import Replacements, temporarily
from ..signatures import first_difference
from . import precompute
from .batches.prompt_groups import PromptGroups
from .batches.token_budget import TokenBudget
from .created_trainers import CreatedTrainers, TrainerState, state_of
from .memory import ReferenceMemory
from .names import DPO

DPOTrainer = Any  # of one of several versions

_PARAMETERS = {
    "_precompute_ref_logps": ["self", "dataset", "name", "batch_size"],
    "_compute_loss": ["self", "model", "inputs", "return_outputs"],
    "create_accelerator_and_postprocess": ["self"],
}

Scoring = Callable[[DPOTrainer, dict[str, Any], bool], AbstractContextManager[None]]
"""Returns a context in which TRL's code scores a batch.

Given the trainer, the batch, and whether the caller wants the output of the model.
"""


@dataclass(eq=False, kw_only=True)
class DPOState(TrainerState):
    memory: ReferenceMemory
    budget: TokenBudget | None = None
    prompt_groups: PromptGroups | None = None


def trainer_class() -> type[DPOTrainer]:
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def unsupported_reason(parameters: dict[str, list[str]]) -> Reason | None:
    """Returns how TRL differs from the versions that this module was tested with, or None.

    `parameters` are those of further functions of the trainer by their names.
    """
    return first_difference(trainer_class(), _PARAMETERS | parameters)


def replace(
    replacements: Replacements,
    trainers: CreatedTrainers,
    options: PatchOptions,
    *,
    state_type: type[DPOState] = DPOState,
    prepare: Callable[[DPOTrainer], None] | None = None,
    disabled_reason: Callable[[dict[str, Any]], Reason | None] | None = None,
    scoring: Scoring = lambda *args: nullcontext(),
) -> None:
    """Replaces functions of the trainer class.

    Args:
        replacements: those of the trainer line.
        trainers: of the trainer line.
        options: of `patch()`.
        state_type: of the state of a trainer.
        prepare: prepares the models of a trainer (see `CreatedTrainers.watch`).
        disabled_reason: why a trainer is left unpatched (see `CreatedTrainers.watch`).
        scoring: a context for TRL's functions that score a batch.
    """
    stock = trainer_class()
    stock_reference = stock.compute_ref_log_probs
    stock_precompute = stock._precompute_ref_logps
    stock_init = stock.__init__
    stock_loss = stock._compute_loss
    reference_parameters = inspect.signature(stock_reference)

    @functools.wraps(stock_reference)
    def compute_ref_log_probs(self, *args, **kwargs):  # TRL before 1.9 does not pass the model
        inputs = reference_parameters.bind(self, *args, **kwargs).arguments["inputs"]
        with counting_calls_as("reference"), scoring(self, inputs, False):
            return stock_reference(self, *args, **kwargs)

    @functools.wraps(stock_precompute)
    def _precompute_ref_logps(self, dataset, name, batch_size, *args, **kwargs):  # some are of a newer TRL
        if not precompute.is_supported(self, dataset):
            return stock_precompute(self, dataset, name, batch_size, *args, **kwargs)
        return precompute.with_precomputed_logps(self, dataset, name, batch_size)

    @functools.wraps(stock_loss)
    def _compute_loss(self, model, inputs, return_outputs, *args, **kwargs):  # some are of a newer TRL
        state = state_of(self, DPOState)
        if state is None:
            return stock_loss(self, model, inputs, return_outputs, *args, **kwargs)
        gather = None if state.budget is None else state.budget.metrics.gather
        with (
            state.memory.serving(self, inputs) as inputs,
            of_all_ranks(self.accelerator, gather),
            scoring(self, inputs, return_outputs),
        ):
            return stock_loss(self, model, inputs, return_outputs, *args, **kwargs)

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        config = inspect.signature(stock_init).bind(self, *args, **kwargs).arguments.get("args")
        if state_of(self, DPOState) is None or config is None or not config.padding_free:
            stock_init(self, *args, **kwargs)
            return
        with temporarily(config, padding_free=False):  # otherwise TRL would warn that it pads
            stock_init(self, *args, **kwargs)
        self.padding_free = forward.is_fused(self.model)
        if not self.padding_free:
            warn(f"{DPO}: padding_free=True, but batches are padded for the reason logged above")

    def new_state() -> DPOState:
        return state_type(memory=ReferenceMemory(options.reference_memory))

    def prepare_trainer(self: DPOTrainer) -> None:
        if prepare is not None:
            prepare(self)
        state = state_of(self, DPOState)
        if state is not None and state.prompt_groups is None and options.group_prompts:
            state.prompt_groups = PromptGroups(whole_steps=options.max_tokens is not None)
            state.prompt_groups.install(self)
        if state is not None and state.budget is None and options.max_tokens is not None:
            state.budget = TokenBudget(options.max_tokens, options.share_prompts, options.group_prompts)
            state.budget.install(self)

    replacements.put(stock, "__init__", __init__)
    trainers.watch(replacements, stock, new_state=new_state, prepare=prepare_trainer, disabled_reason=disabled_reason)
    replacements.put(stock, "_compute_loss", _compute_loss)
    replacements.put(stock, "compute_ref_log_probs", compute_ref_log_probs)
    replacements.put(stock, "_precompute_ref_logps", _precompute_ref_logps)
