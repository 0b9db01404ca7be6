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

from ...models import forward
from ...models.fallback import counting_calls_as, logger
from ..bypass import first_log_callback, left_unpatched, report_skipped_init
from ..concatenated import Inputs, install, liger_option, score
from ..deferred_metrics import Ledger
from ..last_result import LastResult
from ..protocol import STATE, PatchOptions
from ..reference_memory import Memory
from ..replacements import Replacements
from ..signatures import signature_difference
from . import dpo_legacy_metrics
from .dpo_legacy_batches import inputs_of, results_of
from .dpo_legacy_memory import remembered
from .ledgers import discard_states
from .models import new_models
from .names import DPO
from .padding_free import without_padding_free

if TYPE_CHECKING:
    DPOTrainer = Any  # types are checked in an environment with another TRL

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "batch", "is_ref_model"],
    "concatenated_inputs": ["batch", "padding_value"],
    "get_batch_loss_metrics": ["self", "model", "batch", "train_eval"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
    "store_metrics": ["self", "metrics", "train_eval"],
    "create_accelerator_and_postprocess": ["self"],
    "store_flos": ["self"],
    "evaluation_loop": [
        *("self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix")
    ],
}
_PATH = ("get_batch_loss_metrics", "concatenated_forward")

_replacements = Replacements()
_trainers: weakref.WeakSet[DPOTrainer] = weakref.WeakSet()


@dataclass(eq=False)
class _LegacyDPOState:
    """The state of a trainer that was created after `patch()`."""

    memory: Memory
    ledger: Ledger = field(default_factory=Ledger)
    models: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    returns_metrics: bool = False  # whether the function that is running returns its metrics to its caller
    batch: LastResult[Inputs | str] = field(default_factory=LastResult)


def unsupported_reason() -> str | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import dpo_trainer

    for name, expected in _PARAMETERS.items():
        difference = signature_difference(dpo_trainer.DPOTrainer, name, expected)
        if difference is not None:
            return difference
    for name in ("flush_left", "flush_right"):
        if not hasattr(dpo_trainer, name):
            return f"trl.trainer.dpo_trainer must have {name}"
    return None


def trainer_class() -> type[DPOTrainer]:
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def enable(options: PatchOptions) -> None:
    from trl.trainer import dpo_trainer

    DPOTrainer: Any = dpo_trainer.DPOTrainer
    stock_init = DPOTrainer.__init__
    stock_create = DPOTrainer.create_accelerator_and_postprocess
    stock_forward = DPOTrainer.concatenated_forward

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        _track(self)
        if left_unpatched(self, DPO, DPOTrainer, _PATH):
            stock_init(self, *args, **kwargs)
            return
        vars(self)[STATE] = _LegacyDPOState(Memory(options.reference_memory, DPO))
        config = inspect.signature(stock_init).bind(self, *args, **kwargs).arguments.get("args")
        flattens = config is not None and config.padding_free
        with without_padding_free(config) if flattens else nullcontext():  # TRL warns of other attention
            stock_init(self, *args, **kwargs)
        _install(self, options)
        self.padding_free = flattens
        if flattens and not forward.is_fused(self.model):
            logger.warning("%s: padding_free=True falls back to TRL for the reason logged above", DPO)
        if not liger_option(self):  # whose reason is logged
            self.add_callback(first_log_callback(self, DPO))

    @functools.wraps(stock_create)
    def create_accelerator_and_postprocess(self):
        """The last step before the reference is prepared: accelerate then
        wraps our forward, not the reverse.
        """
        _track(self)
        report_skipped_init(self, DPO, DPOTrainer, _PATH)
        stock_create(self)
        _install(self, options)

    @functools.wraps(stock_forward)
    def concatenated_forward(self, model, batch, is_ref_model=False):
        if _state_of(self) is None or not forward.is_installed(model, DPO):  # created before patch()
            return stock_forward(self, model, batch, is_ref_model)

        def stock(of_model):
            padded = of_model is not model  # the batch that has been run
            with without_padding_free(self) if padded else nullcontext():
                return stock_forward(self, of_model, batch, is_ref_model)

        results = functools.partial(results_of, self, is_ref_model)
        with counting_calls_as("reference") if is_ref_model else nullcontext():
            return score(model, DPO, _cached_inputs(self, batch), results, stock)

    def with_reference(self, batch):
        memory = vars(self)[STATE].memory
        return {**batch, **remembered(self, memory, batch, lambda: _cached_inputs(self, batch))}

    _replacements.put(DPOTrainer, "__init__", __init__)
    _replacements.put(DPOTrainer, "create_accelerator_and_postprocess", create_accelerator_and_postprocess)
    _replacements.put(DPOTrainer, "concatenated_forward", concatenated_forward)
    dpo_legacy_metrics.replace(_replacements, DPOTrainer, _state_of, with_reference)


def disable() -> None:
    _replacements.undo()
    discard_states(_trainers)
    _trainers.clear()


def _install(trainer: DPOTrainer, options: PatchOptions) -> None:
    state = _state_of(trainer)
    if state is None:
        return
    liger = liger_option(trainer)
    install(
        new_models(trainer, state.models),
        DPO,
        options,
        statistics=("mean_logits", *(("log_sum_sq_probs",) if trainer.use_weighting else ())),
        disabled_reason=None if liger is None else f"{liger} is set",
    )


def _cached_inputs(trainer: DPOTrainer, batch: dict[str, Any]) -> Inputs | str:
    """`inputs_of`, with the same tensors for policy and reference."""
    state: _LegacyDPOState = vars(trainer)[STATE]
    tensors = tuple(x for x in batch.values() if isinstance(x, Tensor))
    return state.batch.get(tensors, lambda: inputs_of(trainer, batch))


def _track(trainer: DPOTrainer) -> None:
    if STATE not in vars(trainer):  # otherwise it is known, or belongs to the trainer line of a subclass
        _trainers.add(trainer)


def _state_of(trainer: DPOTrainer) -> _LegacyDPOState | None:
    """The state of a trainer, or None if it was created before `patch()` or belongs to the trainer
    line of a subclass.
    """
    state = vars(trainer).get(STATE)
    return state if isinstance(state, _LegacyDPOState) else None
