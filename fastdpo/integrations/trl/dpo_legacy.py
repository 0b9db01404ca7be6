"""TRL's DPOTrainer before its rewrite, patched where it scores a batch, in `concatenated_forward`.

Training, evaluation, the reference and precomputing all call it.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...logs import warn
from ...models import forward
from ...models.fallback import counting_calls_as
from ...reasons import Reason
from ...ref_logps.memory import Memory
from ..bypass import leave_unpatched
from ..concatenated import Inputs, install, liger_reason, score
from ..gathering import of_all_ranks
from ..last_result import LastResult
from ..protocol import STATE, PatchOptions
from ..replacements import Replacements, temporarily
from ..signatures import first_difference
from .created_trainers import CreatedTrainers, TrainerState, state_of
from .dpo_legacy_batches import inputs_of, results_of
from .dpo_legacy_memory import remembered
from .models import new_models
from .names import DPO

if TYPE_CHECKING:
    DPOTrainer = Any  # types are checked in an environment with another TRL

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "batch", "is_ref_model"],
    "concatenated_inputs": ["batch", "padding_value"],
    "get_batch_loss_metrics": ["self", "model", "batch", "train_eval"],
    "create_accelerator_and_postprocess": ["self"],
}
_PATH = ("get_batch_loss_metrics", "concatenated_forward")

_replacements = Replacements()
_trainers = CreatedTrainers(DPO, _PATH)


@dataclass(eq=False, kw_only=True)
class _LegacyDPOState(TrainerState):
    memory: Memory
    models: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    batch: LastResult[Inputs | Reason] = field(default_factory=LastResult)


def unsupported_reason() -> Reason | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import dpo_trainer

    difference = first_difference(dpo_trainer.DPOTrainer, _PARAMETERS)
    if difference is not None:
        return difference
    for name in ("flush_left", "flush_right"):
        if not hasattr(dpo_trainer, name):
            return Reason("different-code", difference=f"trl.trainer.dpo_trainer must have {name}")
    return None


def trainer_class() -> type[DPOTrainer]:
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def enable(options: PatchOptions) -> None:
    for option in ("max_tokens", "group_prompts"):
        if getattr(options, option):
            warn(f"{DPO}: {option} requires TRL 1.8 or later")
    from trl.trainer import dpo_trainer

    DPOTrainer: Any = dpo_trainer.DPOTrainer
    stock_init = DPOTrainer.__init__
    stock_forward = DPOTrainer.concatenated_forward
    stock_metrics = DPOTrainer.get_batch_loss_metrics

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        config = inspect.signature(stock_init).bind(self, *args, **kwargs).arguments.get("args")
        if state_of(self, _LegacyDPOState) is None or config is None or not config.padding_free:
            stock_init(self, *args, **kwargs)
            return
        with temporarily(config, padding_free=False):  # TRL warns of other attention
            stock_init(self, *args, **kwargs)
        _install(self, options)
        self.padding_free = True
        if not forward.is_fused(self.model):
            warn(f"{DPO}: padding_free=True falls back to TRL for the reason logged above")

    def new_state() -> _LegacyDPOState:
        return _LegacyDPOState(memory=Memory(options.reference_memory, DPO))

    @functools.wraps(stock_forward)
    def concatenated_forward(self, model, batch, is_ref_model=False):
        if state_of(self, _LegacyDPOState) is None or not forward.is_installed(model, DPO):  # created before patch()
            return stock_forward(self, model, batch, is_ref_model)

        def stock(of_model):
            padded = of_model is not model  # the batch that has been run
            with temporarily(self, padding_free=False) if padded else nullcontext():
                return stock_forward(self, of_model, batch, is_ref_model)

        results = functools.partial(results_of, self, is_ref_model)
        with counting_calls_as("reference") if is_ref_model else nullcontext():
            return score(model, DPO, _cached_inputs(self, batch), results, stock)

    @functools.wraps(stock_metrics)
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        state = state_of(self, _LegacyDPOState)
        if state is None:
            return stock_metrics(self, model, batch, train_eval)
        known = remembered(self, state.memory, batch, lambda: _cached_inputs(self, batch))
        with of_all_ranks(self.accelerator):
            return stock_metrics(self, model, {**batch, **known}, train_eval)

    _replacements.put(DPOTrainer, "__init__", __init__)
    _trainers.watch(
        _replacements, DPOTrainer, new_state=new_state, prepare=functools.partial(_install, options=options)
    )
    _replacements.put(DPOTrainer, "concatenated_forward", concatenated_forward)
    _replacements.put(DPOTrainer, "get_batch_loss_metrics", get_batch_loss_metrics)


def disable() -> None:
    _replacements.undo()
    _trainers.discard_states()


def _install(trainer: DPOTrainer, options: PatchOptions) -> None:
    state = state_of(trainer, _LegacyDPOState)
    if state is None:
        return
    reason = liger_reason(trainer.args)
    if reason is not None:
        leave_unpatched(trainer, DPO, reason)
        return
    statistics = ("mean_logits", *(("log_sum_sq_probs",) if trainer.use_weighting else ()))
    install(new_models(trainer, state.models), DPO, options, statistics)


def _cached_inputs(trainer: DPOTrainer, batch: dict[str, Any]) -> Inputs | Reason:
    """`inputs_of`, with the same tensors for policy and reference."""
    state: _LegacyDPOState = vars(trainer)[STATE]
    tensors = tuple(x for x in batch.values() if isinstance(x, Tensor))
    return state.batch.get(tensors, lambda: inputs_of(trainer, batch))
