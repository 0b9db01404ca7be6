"""TRL's DPOTrainer from its rewrite in TRL 0.29 to TRL 1.14, which computes from logits.

TRL's own functions run. While they do, the calls of their models are given the labels of the batch
and return a `FusedOutput`, whose logits TRL reads as those of any other output.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...models import forward
from ...models.language_model import text_config
from ...models.state import MakeOutput, ScoredBatch
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..line import liger_reason
from ..scored_rows import ScoredRows
from ..signatures import first_difference, signature_difference
from .memory import ReferenceMemory
from .models import models_of
from .rewritten_dpo import PARAMETERS, DPOState, DPOTrainer, RewrittenDPOLine

_INIT_PARAMETERS = [
    *("self", "model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    *("compute_metrics", "callbacks", "optimizers"),
]
_TRUNCATE_PARAMETERS = ["self", "input_ids", "attention_mask", "completion_mask"]


@dataclass(eq=False, kw_only=True)
class _LogitsState(DPOState):
    """The state of one trainer.

    Attributes:
        labels: of the batch that is being scored, int64 [2B, L]; None between batches.
        hooks: the hooks on models, which add the labels to a call.
    """

    labels: Tensor | None = None
    hooks: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = field(default_factory=weakref.WeakKeyDictionary)

    def hook(self, model: nn.Module) -> RemovableHandle:
        """Adds the hook to a model."""

        def add_labels(module, args, kwargs):
            return None if self.labels is None else (args, {**kwargs, "labels": self.labels, "fused_lm_head": True})

        self.hooks[model] = model.register_forward_pre_hook(add_labels, with_kwargs=True)
        return self.hooks[model]

    @contextmanager
    def scoring(self, labels: Tensor) -> Iterator[None]:
        self.labels = labels
        try:
            yield
        finally:
            self.labels = None


class LogitsDPOLine(RewrittenDPOLine):
    parameters = PARAMETERS
    path = ("compute_loss", "_compute_loss")

    def unsupported_reason(self) -> Reason | None:
        trainer = self.trainer_class()
        if "logits" not in trainer._compute_loss.__code__.co_names:
            return Reason("different-code", difference="DPOTrainer._compute_loss must read logits")
        since_1_9 = "model" in inspect.signature(trainer.compute_ref_log_probs).parameters
        parameters = {"compute_ref_log_probs": ["self", *(("model",) if since_1_9 else ()), "inputs"]}
        if hasattr(trainer, "_truncate_inputs"):  # TRL 0.29
            parameters["_truncate_inputs"] = _TRUNCATE_PARAMETERS
        return (
            super().unsupported_reason()
            or first_difference(trainer, parameters)
            or signature_difference(trainer, "__init__", _INIT_PARAMETERS, exact=False)
            or signature_difference(self.module(), "selective_log_softmax", ["logits", "index"], exact=False)
        )

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        return liger_reason(arguments.get("args"))

    def models(self, trainer: DPOTrainer) -> dict[str, nn.Module]:
        return models_of(trainer)

    def new_state(self) -> _LogitsState:
        return _LogitsState(name=self.name, memory=ReferenceMemory(self.options.reference_memory))

    def statistics(self, trainer: DPOTrainer) -> tuple[str, ...]:
        weighting = ("log_sum_sq_probs",) if trainer.use_weighting else ()
        return ("entropy", "mean_logits", "is_top1", *weighting)

    def make_output(self, model: Any) -> MakeOutput:
        return functools.partial(_make_output, text_config(model))

    def prepare(self, trainer: DPOTrainer) -> None:
        super().prepare(trainer)
        state = self.state_of(trainer)
        if state is None:
            return
        for model in self.models(trainer).values():
            if model not in state.hooks and forward.is_installed(model, self.name):
                self.replacements.on_undo(state.hook(model).remove)

    def replace(self) -> None:
        from .fused_logits import replace_functions

        replace_functions(self.replacements, self.module())
        super().replace()
        self.replacements.put(self.trainer_class(), "ref_model", property(_reference_model, self.set_reference_model))

    def set_reference_model(self, trainer: DPOTrainer, model: nn.Module | None) -> None:
        """TRL sets it twice: as it is, and as accelerate has prepared it.

        Preparing the models in between makes accelerate wrap our forward, not the reverse.
        """
        vars(trainer)["ref_model"] = model
        self.prepare(trainer)

    def scoring(self, trainer: DPOTrainer, inputs: dict[str, Any], wants_output: bool) -> AbstractContextManager[None]:
        state = self.state_of(trainer)
        if state is None or not state.hooks:
            return nullcontext()
        if wants_output:
            forward.record_fallback(trainer.model, self.name, Reason("wants-output"))
            return nullcontext()
        ids, completion = inputs["input_ids"], inputs["completion_mask"]
        if hasattr(trainer, "_truncate_inputs"):  # TRL 0.29 truncates batches
            ids, _, completion = trainer._truncate_inputs(ids, inputs["attention_mask"], completion)
        return state.scoring(ids.masked_fill(completion == 0, IGNORE_INDEX))


def _make_output(config: Any, scored: ScoredBatch, kwargs: dict) -> object:
    from .fused_logits import FusedOutput

    rows = ScoredRows.of(config, scored)
    return FusedOutput(**{field.name: getattr(rows, field.name) for field in fields(FusedOutput)})


def _reference_model(trainer: DPOTrainer) -> nn.Module | None:
    try:
        return vars(trainer)["ref_model"]
    except KeyError:
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute 'ref_model'") from None
