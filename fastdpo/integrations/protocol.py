"""The interface of a trainer line: the functions of a module that is listed in `lines.LINES`."""

from __future__ import annotations

from typing import Protocol

from ..reasons import Reason
from .options import PatchOptions

STATE = "_fastdpo_state"
"""The attribute of a trainer that holds the state of its trainer line.
Trainers created before `patch()` have none. For trainers whose class bypasses the patched
functions, it is None.
"""


class TrainerLine(Protocol):
    """The functions of a module that patches one trainer line: one
    trainer class in a range of versions.
    """

    def unsupported_reason(self) -> Reason | None:
        """Compares the functions to be replaced with those that were tested.

        Returns what differs, or None. Changes nothing. May raise ImportError.
        """

    def enable(self, options: PatchOptions) -> None:
        """Patches the trainer class. Called only if `unsupported_reason` has returned None."""

    def disable(self) -> None:
        """Restores the trainer class, and the trainers that were created since `enable`."""

    def trainer_class(self) -> type:
        """The trainer class. `enable` leaves its existing instances as they are.

        Imported from the module that defines it, since `fastdpo run` patches as soon as that module has
        been imported: packages that import it may still be incomplete then.
        """
        ...
