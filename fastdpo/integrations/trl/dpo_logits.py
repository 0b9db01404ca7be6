"""TRL's DPOTrainer from its rewrite in TRL 0.29 to TRL 1.14, which computes from logits.

TRL's own functions run. While they do, the calls of their models are given the labels of the batch
and return `ScoredRows`, whose `logits` TRL reads as those of any other output.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ...models import forward
from ...ops.head.results import LOGGED_STATISTICS
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..line import liger_reason
from ..replacements import temporarily
from ..scored_rows import ScoredRows
from .dpo import PARAMETERS, DPOTrainer, RewrittenDPOLine
from .fused_logits import replace_functions
from .max_tokens.budget import Scores

_PARAMETERS = {
    **PARAMETERS,
    "__init__": [
        *("self", "model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
        *("compute_metrics", "callbacks", "optimizers", "..."),
    ],
    ":selective_log_softmax": ["logits", "index", "..."],
}
_TRUNCATE_PARAMETERS = ["self", "input_ids", "attention_mask", "completion_mask"]


class LogitsDPOLine(RewrittenDPOLine):
    parameters = _PARAMETERS
    path = ("compute_loss", "_compute_loss")

    def unsupported_reason(self) -> Reason | None:
        trainer = self.trainer_class()
        if "logits" not in trainer._compute_loss.__code__.co_names:
            return Reason("different-code", difference="DPOTrainer._compute_loss must read logits")
        since_1_9 = "model" in inspect.signature(trainer.compute_ref_log_probs).parameters
        parameters = {"compute_ref_log_probs": ["self", *(("model",) if since_1_9 else ()), "inputs"]}
        if hasattr(trainer, "_truncate_inputs"):  # TRL 0.29
            parameters["_truncate_inputs"] = _TRUNCATE_PARAMETERS
        return super().unsupported_reason() or self.signature_difference(parameters)

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        return liger_reason(arguments.get("args"))

    def statistics(self, trainer: DPOTrainer) -> tuple[str, ...]:
        weighting = ("log_sum_sq_probs",) if trainer.use_weighting else ()
        return (*LOGGED_STATISTICS, *weighting)

    def install(self, trainer: DPOTrainer, role: str, model: nn.Module) -> None:
        """Has the calls of the model given the labels of the batch that is being scored."""
        super().install(trainer, role, model)
        state = self.state_of(trainer)

        def add_labels(module, args, kwargs):
            return None if state.running is None else (args, {**kwargs, "labels": state.running, "fused_lm_head": True})

        self.replacements.on_undo(model.register_forward_pre_hook(add_labels, with_kwargs=True).remove)

    def replace(self) -> None:
        replace_functions(self.replacements, self.module())
        super().replace()
        self.replacements.put(self.trainer_class(), "ref_model", property(_reference_model, self.set_reference_model))

    def set_reference_model(self, trainer: DPOTrainer, model: nn.Module | None) -> None:
        """TRL sets it twice: as it is, and as accelerate has prepared it.

        Preparing the models in between makes accelerate wrap our forward, not the reverse.
        """
        vars(trainer)["ref_model"] = model
        self.prepare(trainer)

    def scores_of(self, trainer: DPOTrainer, output: Any, length: int) -> Scores:
        rows = output
        if not isinstance(output, ScoredRows):  # a call that fell back
            rows = ScoredRows.of_output(
                SimpleNamespace(logits=output.logits[:, -length:]),
                self.state_of(trainer).running[:, 1:],
                self.statistics(trainer),
            )
        return {name: x for name, x in rows._replace(aux_loss=None)._asdict().items() if x is not None}

    def output_of(self, known: Mapping[str, Tensor]) -> ScoredRows:
        return ScoredRows(**{name: known[name] for name in ScoredRows._fields if name in known})

    def scoring(self, trainer: DPOTrainer, inputs: dict[str, Any], wants_output: bool) -> AbstractContextManager[None]:
        state = self.state_of(trainer)
        if state is None:
            return nullcontext()
        if wants_output:
            forward.record_fallback(trainer.model, self.name, Reason("wants-output"))
            return nullcontext()
        ids, completion = inputs["input_ids"], inputs["completion_mask"]
        if hasattr(trainer, "_truncate_inputs"):  # TRL 0.29 truncates batches
            ids, _, completion = trainer._truncate_inputs(ids, inputs["attention_mask"], completion)
        return temporarily(state, running=ids.masked_fill(completion == 0, IGNORE_INDEX))


def _reference_model(trainer: DPOTrainer) -> nn.Module | None:
    try:
        return vars(trainer)["ref_model"]
    except KeyError:
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute 'ref_model'") from None
