"""A plugin of axolotl that patches the trainers of TRL of which axolotl's are subclasses.

    plugins:
      - fastdpo.integrations.axolotl.FastDPOPlugin

Only axolotl imports this module. Written against the plugin interface of axolotl 0.19.0.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without axolotl.

from __future__ import annotations

import os
import sys
from typing import Any

from axolotl.integrations.base import BasePlugin

from ..logs import report
from ..models.calls import calls_line
from ..reasons import Reason
from .bypass import STATE
from .patching import PatchError, PatchReport, patch

_HOOKS = ("pre_model_load", "post_trainer_create", "post_train_unload")


class FastDPOPlugin(BasePlugin):
    """Patches the trainers that `fastdpo.patch()` patches, with its default options.

    Rank 0 prints the report when the trainer has been created, and the number of calls at the end.

    Raises:
        PatchError: a trainer of the installed TRL cannot be patched, or axolotl has other hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        missing = [name for name in _HOOKS if not hasattr(BasePlugin, name)]
        if missing:  # axolotl would not call it, and train unpatched
            raise PatchError(
                f"{type(self).__name__}: axolotl's plugins must have {', '.join(missing)}; use `fastdpo run`"
            )
        self._report: PatchReport | None = None

    def pre_model_load(self, cfg: Any) -> None:
        """Patches the trainers, after axolotl's own changes to TRL. Called for each model."""
        if self._report is None:
            self._report = patch()
            if not all(seam.on for seam in self._report.seams):
                raise PatchError(f"{type(self).__name__}: {self._report}")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Prints the report, or says that the trainer is another one, such as that of `rl: kto`."""
        if STATE not in vars(trainer):
            reason = Reason("other-trainer", trainers=" or ".join(self._trainers()))
            report(f"axolotl ({type(trainer).__name__}): not fused, {reason.named}")
        elif vars(trainer)[STATE] is not None:  # else its line has said why
            _print(self._report)

    def post_train_unload(self, cfg: Any) -> None:
        """Prints how many calls of models took which path."""
        for line in filter(None, map(calls_line, self._trainers())):
            _print(line)

    def _trainers(self) -> list[str]:
        return [seam.name for seam in self._report.seams] if self._report else []


def _print(line: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
