"""fastdpo: DPO training with packed batches, shared prompts and a fused LM head, and the same numbers.

`fastdpo.patch()` patches the trainers that are installed. In custom training loops, `fastdpo.prepare` and
`fastdpo.score` compute the log-probabilities of a batch, `fastdpo.ops` has losses and the parts of which scoring
consists, `fastdpo.ref_logps` computes reference log-probabilities, and `fastdpo.metrics` has means that are exact
over all ranks.

Public names are imported when they are first used, so that the command line starts without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import metrics, ops, ref_logps
    from .integrations.custom_loops import prepare, restore, score
    from .integrations.patching import PatchError, PatchReport, Seam, patch, patched, unpatch
    from .integrations.scored_rows import ScoredRows
    from .logs import NotFused
    from .models.calls import calls
    from .models.examine.verification import VerificationError

__version__ = "0.1.0"

__all__ = [
    "NotFused",
    "PatchError",
    "PatchReport",
    "ScoredRows",
    "Seam",
    "VerificationError",
    "calls",
    "metrics",
    "ops",
    "patch",
    "patched",
    "prepare",
    "ref_logps",
    "restore",
    "score",
    "unpatch",
]

_MODULES = {"metrics": ".metrics", "ops": ".ops", "ref_logps": ".ref_logps"}
_HOMES = {
    ".integrations.custom_loops": ("prepare", "restore", "score"),
    ".integrations.patching": ("PatchError", "PatchReport", "Seam", "patch", "patched", "unpatch"),
    ".integrations.scored_rows": ("ScoredRows",),
    ".logs": ("NotFused",),
    ".models.calls": ("calls",),
    ".models.examine.verification": ("VerificationError",),
}
"""The modules that are public names, and the modules that define the others."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = importlib.import_module(_MODULES[name], __name__)
    else:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
