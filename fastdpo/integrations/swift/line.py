"""What the trainer lines of ms-swift share: its trainers, their models and their batches.

ms-swift deletes `__init__` of TRL's trainers, whose subclasses its trainers are. A trainer of
ms-swift has its state before functions of TRL run, so the line of TRL's own trainer leaves it alone.
"""

from __future__ import annotations

import importlib
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...models import forward
from ...models.wrapped import without_adapters
from ...reasons import Reason
from ..bypass import leave_unpatched
from ..concatenated import Inputs, liger_reason
from ..last_result import LastResult
from ..protocol import STATE
from ..replacements import Replacements
from ..signatures import first_difference
from ..trl.created_trainers import CreatedTrainers, TrainerState
from ..trl.models import new_models
from .batches import inputs_of


@dataclass(eq=False, kw_only=True)
class _SwiftState(TrainerState):
    models: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    batches: defaultdict[str, LastResult[Inputs | Reason]] = field(default_factory=lambda: defaultdict(LastResult))
    inputs: dict[str, Inputs] | None = None  # by the kind of batch, while `KTOTrainer.forward` scores them


class SwiftLine:
    """One trainer line of ms-swift.

    Args:
        trainer: name of the trainer class, such as "DPOTrainer".
        path: the functions that lead to the fused call, as in `bypass.bypass_reason`.
        parameters: those of each function that the line replaces or relies on.
    """

    def __init__(self, trainer: str, path: tuple[str, ...], parameters: dict[str, list[str]]):
        self.name = f"swift.{trainer}"
        self.replacements = Replacements()
        self._trainer = trainer
        self._trainers = CreatedTrainers(self.name, path)
        self._parameters = {"create_accelerator_and_postprocess": ["self"], **parameters}

    def trainer_class(self) -> Any:
        kind = self._trainer.removesuffix("Trainer").lower()
        return getattr(importlib.import_module(f"swift.rlhf_trainers.{kind}_trainer"), self._trainer)

    def unsupported_reason(self) -> Reason | None:
        """Returns how ms-swift differs from the versions that were tested, or None."""
        return first_difference(self.trainer_class(), self._parameters)

    def disable(self) -> None:
        self.replacements.undo()
        self._trainers.discard_states()

    def watch(self, install: Callable[[Any, list], None]) -> None:
        """Gives new trainers their state.

        Args:
            install: installs the fused forward on new models of a trainer, given by role and causal
                LM.
        """

        def prepare(trainer: Any) -> None:
            state = vars(trainer).get(STATE)
            if state is None:
                return
            reason = _disabled_reason(trainer)
            if reason is not None:
                leave_unpatched(trainer, self.name, reason)
                return
            install(trainer, new_models(trainer, state.models))

        self._trainers.watch(self.replacements, self.trainer_class(), new_state=_SwiftState, prepare=prepare)

    def calls(self, trainer: Any, model: Any) -> bool:
        """Whether a trainer's calls of a model are to be fused."""
        return vars(trainer).get(STATE) is not None and forward.is_installed(model, self.name)

    def inputs_of(
        self, trainer: Any, batch: dict[str, Any], model: Any, *, router_logits: bool, kind: str = ""
    ) -> Inputs | Reason:
        """`batches.inputs_of`, with the same tensors for policy and reference; or the reason why no
        call of the model can be fused, as far as it is known.

        Args:
            trainer: with a state.
            batch: of its template.
            model: of the trainer.
            router_logits: whether the call asks for the auxiliary loss of a router.
            kind: distinguishes the batches of a step.
        """
        reason = forward.disabled_reason(model, self.name)
        if reason is not None:
            return reason
        state: _SwiftState = vars(trainer)[STATE]
        tensors = tuple(x for x in batch.values() if isinstance(x, Tensor))
        options = dict(padding_free=trainer.template.padding_free, router_logits=router_logits)
        return state.batches[kind].get(tensors, lambda: inputs_of(batch, **options))


def _disabled_reason(trainer: Any) -> Reason | None:
    """Why a trainer that has its accelerator cannot be fused."""
    from transformers import PreTrainedModel

    base = without_adapters(trainer.model)
    if not isinstance(base, PreTrainedModel):
        return Reason("model-type", kind=type(base).__name__)
    if trainer.model_meta.is_multimodal:
        return Reason("multimodal-template")
    if trainer.template.sequence_parallel_size > 1:
        return Reason("split-sequences", method="sequence parallelism")
    if getattr(trainer.args, "tuner_backend", None) == "unsloth":
        return Reason("unsloth")
    return liger_reason(trainer.args)
