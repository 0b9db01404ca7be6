"""Trainers of TRL whose own loss reads logits.

TRL's functions run. While they do, the calls of their models are given the labels of the batch and
return `ScoredRows`, whose `logits` TRL reads as those of any other output.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from ...models import forward
from ...models.examine import support
from ...ops.head.results import LOGGED_STATISTICS
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..line import TrainerLine
from ..options import liger_reason
from ..replacements import temporarily
from ..scored_rows import ScoredRows
from .fused_logits import replace_functions
from .max_tokens.budget import Budget
from .max_tokens.steps import Scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LogitsLine(TrainerLine):
    """The line of such a trainer."""

    logged = LOGGED_STATISTICS

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        return liger_reason(arguments.get("args"))

    def install(self, trainer: Any, role: str, model: nn.Module, base: PreTrainedModel) -> None:
        """Has the calls of the model given the labels of the batch that is being scored."""
        super().install(trainer, role, model, base)
        state = self.state_of(trainer)
        if model in state.models:
            return

        def add_labels(module, args, kwargs):
            scores = {"labels": state.running, "fused_lm_head": support.wrapping_reason(module) or True}
            return None if state.running is None else (args, {**kwargs, **scores})

        self.replacements.callback(model.register_forward_pre_hook(add_labels, with_kwargs=True).remove)

    def replace(self) -> None:
        replace_functions(self.replacements, self.module())
        super().replace()

    def labels(self, trainer: Any, inputs: dict[str, Any]) -> Tensor:
        """The tokens of the completions of a batch, [R, L]."""
        return inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORE_INDEX)

    def scoring(self, trainer: Any, inputs: dict[str, Any], wants_output: bool) -> AbstractContextManager[None]:
        """A context in which TRL's code scores a batch, for a caller that may want the output of the model."""
        if wants_output:
            forward.record_fallback(trainer.model, self.name, Reason("wants-output"))
            return nullcontext()
        return temporarily(self.state_of(trainer), running=self.labels(trainer, inputs))

    def rows_of(self, trainer: Any, output: Any, length: int) -> ScoredRows:
        """The scored rows of the output of a model for rows of this length."""
        if isinstance(output, ScoredRows):
            return output
        logits = SimpleNamespace(logits=output.logits[:, -length:])  # of a call that fell back
        return ScoredRows.of_output(logits, self.state_of(trainer).running[:, 1:], self.statistics(trainer))


@dataclass(kw_only=True, eq=False)
class LogitsBudget(Budget):
    """How the steps of such a trainer are cut."""

    def scores_of(self, trainer: Any, output: Any, length: int) -> Scores:
        rows = cast(LogitsLine, self.line).rows_of(trainer, output, length)
        return {name: x for name, x in rows._replace(aux_loss=None)._asdict().items() if x is not None}

    def output_of(self, known: Scores) -> ScoredRows:
        return ScoredRows(**{name: known[name] for name in ScoredRows._fields if name in known})
