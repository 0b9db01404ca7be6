"""The trainers of a class that are created while it is patched."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ...reasons import Reason
from ..bypass import bypass_reason, first_log_callback, leave_unpatched, report_skipped_init
from ..protocol import STATE
from ..replacements import Replacements
from . import fused_head

S = TypeVar("S", bound="TrainerState")


@dataclass(eq=False, kw_only=True)
class TrainerState:
    """The state of a trainer that was created after `patch()`."""


def state_of(trainer: Any, kind: type[S]) -> S | None:
    """The state of a trainer, or None if it was created before `patch()` or belongs to the trainer
    line of a subclass, whose state is of another kind.
    """
    state = vars(trainer).get(STATE)
    return state if isinstance(state, kind) else None


class CreatedTrainers:
    """Gives each new trainer of a class its state, and remembers the trainers to discard the states.

    A trainer to which the line of a subclass has given a state, or none, is left to that line.

    Args:
        integration: name of the trainer, such as "trl.KTOTrainer".
        path: the functions that lead to the fused call (see `bypass.bypass_reason`). A trainer
            whose class bypasses them is left unpatched, and one without a fused call by its first
            log is reported.
    """

    def __init__(self, integration: str, path: tuple[str, ...]):
        self._integration, self._path = integration, path
        # By their ids: a trainer class that is a dataclass has instances without a hash.
        self._trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def watch(
        self,
        replacements: Replacements,
        stock: type,
        *,
        new_state: Callable[[], TrainerState] = TrainerState,
        prepare: Callable[[Any], None] | None = None,
        disabled_reason: Callable[[dict[str, Any]], Reason | None] | None = None,
    ) -> None:
        """Replaces the functions of a trainer class in which a trainer is created.

        Args:
            replacements: those of the trainer line.
            stock: the trainer class.
            new_state: makes the state of a trainer.
            prepare: called with the trainer after its accelerator has been created, which is the
                last step before models are prepared, and once more after `__init__`.
            disabled_reason: returns why a trainer is left unpatched, or None, from the arguments of
                its `__init__` by name.
        """
        init: Any = stock.__init__
        create: Any = getattr(stock, "create_accelerator_and_postprocess")  # noqa: B009

        @functools.wraps(init)
        def __init__(trainer, *args, **kwargs):
            if self._belongs_to_another(trainer):
                init(trainer, *args, **kwargs)
                return
            self._trainers[id(trainer)] = trainer
            reason = bypass_reason(trainer, stock, self._path)
            if reason is None and disabled_reason is not None:
                reason = disabled_reason(inspect.signature(init).bind(trainer, *args, **kwargs).arguments)
            if reason is not None:
                leave_unpatched(trainer, self._integration, reason)
                with fused_head.leaving_models():
                    init(trainer, *args, **kwargs)
                return
            vars(trainer)[STATE] = new_state()
            init(trainer, *args, **kwargs)
            if prepare is not None:
                prepare(trainer)
            trainer.add_callback(first_log_callback(trainer, self._integration))

        @functools.wraps(create)
        def create_accelerator_and_postprocess(trainer):
            if self._belongs_to_another(trainer):
                create(trainer)
                return
            self._trainers[id(trainer)] = trainer
            report_skipped_init(trainer, self._integration, stock, self._path)
            create(trainer)
            if prepare is not None:
                prepare(trainer)

        replacements.put(stock, "__init__", __init__)
        replacements.put(stock, "create_accelerator_and_postprocess", create_accelerator_and_postprocess)

    def _belongs_to_another(self, trainer: Any) -> bool:
        return STATE in vars(trainer) and id(trainer) not in self._trainers

    def discard_states(self) -> None:
        """Removes the states of the trainers."""
        for trainer in list(self._trainers.values()):
            vars(trainer).pop(STATE, None)
        self._trainers.clear()
