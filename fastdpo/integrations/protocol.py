"""The interface of a trainer line: the functions of a module that is listed in `lines.LINES`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from ..reasons import Reason

if TYPE_CHECKING:
    from ..models.layouts import SharePrompts

STATE = "_fastdpo_state"
"""The attribute of a trainer that holds the state of its trainer line.
Trainers created before `patch()` have none. For trainers whose class bypasses the patched
functions, it is None.
"""


@dataclass(frozen=True)
class PatchOptions:
    """The options of `patch()`.

    Attributes:
        share_prompts: compute the tokens that the answers to a prompt begin with once: True, False,
            or "deterministic", unless dropout or other noise is active.
        memory_budget: bytes of the head's gradient tiles to keep from forward to backward, or None
            for the default of `ops.linear_logps`.
        reference_memory: remember the reference's log-probabilities of each pair: not at all, in
            this process, or in the directory with this path or URL.
        verify: compare the first fused calls of each model with stock ones: True, False, or "trial", which
            leaves a model to stock if they differ, and raises no error.
        max_tokens: distinct tokens of a micro-batch, by which steps are cut. None: they are not.
        group_prompts: put pairs of one prompt into one batch.
    """

    share_prompts: SharePrompts = True
    memory_budget: int | None = None
    reference_memory: bool | str = False
    verify: bool | Literal["trial"] = False
    max_tokens: int | None = None
    group_prompts: bool = False

    def of_forward(self) -> dict[str, Any]:
        """Those that are options of a fused forward (`models.forward.Request`)."""
        return dict(share_prompts=self.share_prompts, memory_budget=self.memory_budget, verify=self.verify)


class GivenOptions(TypedDict, total=False):
    """The arguments of `patch()` that are options: those of `PatchOptions`, of which any may be given."""

    share_prompts: SharePrompts
    memory_budget: int | None
    reference_memory: bool | str | os.PathLike[str]
    verify: bool
    max_tokens: int | None
    group_prompts: bool


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
