"""TRL's DPOTrainer from its rewrite in TRL 0.29 to TRL 1.14, which computes from logits.

TRL's own functions run. While they do, the calls of their models are given the labels of the batch
and return a `FusedOutput`, whose logits TRL reads as those of any other output.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...models import forward
from ...models.forward import ScoredBatch
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from .. import concatenated
from ..protocol import PatchOptions
from ..replacements import Replacements
from ..signatures import signature_difference
from . import rewritten_dpo
from .created_trainers import CreatedTrainers, state_of
from .models import models_of, new_models
from .names import DPO
from .rewritten_dpo import DPOState, DPOTrainer, trainer_class

__all__ = ["disable", "enable", "trainer_class", "unsupported_reason"]

_INIT_PARAMETERS = [
    *("self", "model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    *("compute_metrics", "callbacks", "optimizers"),
]
_TRUNCATE_PARAMETERS = ["self", "input_ids", "attention_mask", "completion_mask"]

_replacements = Replacements()
_trainers = CreatedTrainers(DPO, ("compute_loss", "_compute_loss"))
_scorers: weakref.WeakSet[_Scorer] = weakref.WeakSet()


class _Scorer:
    """Makes the calls of one trainer's models fused.

    Attributes:
        labels: of the batch that is being scored, int64 [2B, L]; None between batches.
        known: the models that were examined.
        hooks: the hooks on them, which add the labels to a call.
    """

    def __init__(self) -> None:
        self.labels: Tensor | None = None
        self.known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.hooks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        _scorers.add(self)

    def install(self, trainer: DPOTrainer, options: PatchOptions) -> None:
        statistics = ("entropy", "mean_logits", "is_top1", *(("log_sum_sq_probs",) if trainer.use_weighting else ()))
        models = new_models(trainer, self.known)
        concatenated.install(models, DPO, options, statistics, make_output=_make_output)

        def add_labels(module, args, kwargs):
            return None if self.labels is None else (args, {**kwargs, "labels": self.labels, "fused_lm_head": True})

        for model in models_of(trainer).values():
            if model not in self.hooks and forward.is_installed(model, DPO):
                self.hooks[model] = model.register_forward_pre_hook(add_labels, with_kwargs=True)

    @contextmanager
    def scoring(self, labels: Tensor) -> Iterator[None]:
        self.labels = labels
        try:
            yield
        finally:
            self.labels = None


@dataclass(eq=False, kw_only=True)
class _LogitsState(DPOState):
    scorer: _Scorer = field(default_factory=_Scorer)


def unsupported_reason() -> Reason | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import dpo_trainer

    trainer: Any = dpo_trainer.DPOTrainer
    if "logits" not in trainer._compute_loss.__code__.co_names:
        return Reason("different-code", difference="DPOTrainer._compute_loss must read logits")
    since_1_9 = "model" in inspect.signature(trainer.compute_ref_log_probs).parameters
    parameters = {"compute_ref_log_probs": ["self", *(("model",) if since_1_9 else ()), "inputs"]}
    if hasattr(trainer, "_truncate_inputs"):  # TRL 0.29
        parameters["_truncate_inputs"] = _TRUNCATE_PARAMETERS
    return (
        rewritten_dpo.unsupported_reason(parameters)
        or signature_difference(trainer, "__init__", _INIT_PARAMETERS, exact=False)
        or signature_difference(dpo_trainer, "selective_log_softmax", ["logits", "index"], exact=False)
    )


def enable(options: PatchOptions) -> None:
    from trl.trainer import dpo_trainer

    from .fused_logits import replace_functions

    prepare = functools.partial(_prepare, options=options)
    replace_functions(_replacements, dpo_trainer)
    rewritten_dpo.replace(
        _replacements,
        _trainers,
        options,
        state_type=_LogitsState,
        prepare=prepare,
        disabled_reason=lambda arguments: concatenated.liger_reason(arguments.get("args")),
        scoring=_scoring,
    )
    _replacements.put(dpo_trainer.DPOTrainer, "ref_model", _reference_model(prepare))


def disable() -> None:
    _replacements.undo()
    _trainers.discard_states()
    for hook in [hook for scorer in _scorers for hook in scorer.hooks.values()]:
        hook.remove()
    _scorers.clear()


def _scorer_of(trainer: DPOTrainer) -> _Scorer | None:
    state = state_of(trainer, _LogitsState)
    return None if state is None else state.scorer


def _prepare(trainer: DPOTrainer, options: PatchOptions) -> None:
    """Makes the calls of the models fused that a trainer has now. Does nothing if it is not patched."""
    scorer = _scorer_of(trainer)
    if scorer is not None:
        scorer.install(trainer, options)


def _make_output(config: Any, scored: ScoredBatch, kwargs: dict) -> object:
    from .fused_logits import FusedOutput

    return FusedOutput(**concatenated.results_of(config, scored, kwargs))


def _reference_model(prepare: Callable[[DPOTrainer], None]) -> property:
    """`DPOTrainer.ref_model`, which TRL sets twice: as it is, and as accelerate has prepared it.

    Preparing the models in between makes accelerate wrap our forward, not the reverse.
    """

    def get(self):
        try:
            return vars(self)["ref_model"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'ref_model'") from None

    def put(self, model):
        vars(self)["ref_model"] = model
        prepare(self)

    return property(get, put)


def _scoring(trainer: DPOTrainer, inputs: dict[str, Any], wants_output: bool) -> AbstractContextManager[None]:
    scorer = _scorer_of(trainer)
    if scorer is None or not scorer.hooks:
        return nullcontext()
    if wants_output:
        forward.record_fallback(trainer.model, DPO, Reason("wants-output"))
        return nullcontext()
    ids, completion = inputs["input_ids"], inputs["completion_mask"]
    if hasattr(trainer, "_truncate_inputs"):  # TRL 0.29 truncates batches
        ids, _, completion = trainer._truncate_inputs(ids, inputs["attention_mask"], completion)
    return scorer.scoring(ids.masked_fill(completion == 0, IGNORE_INDEX))
