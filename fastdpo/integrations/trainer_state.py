"""What fastdpo knows of a trainer that is patched."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ..models.calls import Counted, counted
from ..models.parts import Wrapping
from ..models.running import pace

if TYPE_CHECKING:
    from .trl.max_tokens.steps import StepBudget


@dataclass(eq=False, kw_only=True)
class TrainerState:
    """The state of a trainer that was created after `patch()`. Copies and pickles of the trainer have its name instead,
    and get another state when they train.

    Attributes:
        name: of the line that has made it, such as "trl.DPOTrainer".
        models: the models that it has had so far, without the wrappers of engines.
        forwards: the transformers models in those that it has now, with a reference to the state of each.
        budget: cuts its steps; None without `max_tokens`.
        running: what the functions of the line tell each other while a batch is scored, otherwise None.
        has_fused: whether a call has been fused, if the line keeps it.
        has_stepped: whether the trainer has computed the gradients of a step.
        has_logged: whether its calls were logged.
        first_step: the number of that of the training that runs.
        training: that runs, or one that has ended.
        before: what was counted in the process before the trainer was created.
        wrapping: remembers what is around its models.
        undo: undoes what was replaced in objects of the trainer.
    """

    name: str
    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    forwards: weakref.WeakKeyDictionary[nn.Module, Callable] = field(default_factory=weakref.WeakKeyDictionary)
    budget: StepBudget | None = None
    running: Any = None
    has_fused: bool = False
    has_stepped: bool = False
    has_logged: bool = False
    first_step: int = sys.maxsize
    training: pace.Training = field(default_factory=pace.training)
    before: Counted = field(default_factory=counted)
    wrapping: Wrapping = field(default_factory=Wrapping)
    undo: ExitStack = field(default_factory=ExitStack)

    def __reduce__(self) -> tuple:
        return str, (self.name,)
