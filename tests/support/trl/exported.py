"""Every trainer that TRL exports, and what `fastdpo.patch()` does to it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import trl
import trl.experimental
from transformers import Trainer

from fastdpo.integrations.lines import LINES, Line


def exported() -> Iterator[tuple[str, type]]:
    """Each trainer class by the name that it is imported by."""
    packages = ("trl", *(f"trl.experimental.{x.name}" for x in pkgutil.iter_modules(trl.experimental.__path__)))
    for package in packages:
        module = importlib.import_module(package)
        for name in dir(module):
            found = getattr(module, name) if name.endswith("Trainer") and name[0] != "_" else None
            if isinstance(found, type) and issubclass(found, Trainer):
                yield f"{package}.{name}", found


def line_of(trainer_class: type) -> Line | None:
    """The line that patches a class itself."""
    name = f"trl.{trainer_class.__name__}"
    return next((x for x in LINES if x.trainer == name and trainer_class.__module__ in x.trainer_modules), None)


X = "trl.experimental"
LOGITS = "as in TRL: its own loss reads logits"
UNTOUCHED = "untouched"
SERVER = f"{UNTOUCHED}, needs a server"
CLAIMS = {
    f"{X}.gmpo.GMPOTrainer": "fused as a `GRPOTrainer`",
    f"{X}.bema_for_ref_model.DPOTrainer": "fused as a `DPOTrainer`",
    f"{X}.kto.KTOTrainer": "fused as a `KTOTrainer`",
    f"{X}.gkd.GKDTrainer": LOGITS,
    f"{X}.gold.GOLDTrainer": LOGITS,
    f"{X}.sdft.SDFTTrainer": UNTOUCHED,
    f"{X}.sdpo.SDPOTrainer": UNTOUCHED,
    f"{X}.iw_opd.IWOPDTrainer": UNTOUCHED,
    "trl.DistillationTrainer": UNTOUCHED,
    f"{X}.distillation.DistillationTrainer": UNTOUCHED,
    f"{X}.server_distillation.ServerDistillationTrainer": SERVER,
    f"{X}.async_grpo.AsyncGRPOTrainer": SERVER,
    f"{X}.async_distillation.AsyncDistillationTrainer": SERVER,
}
"""What `patch` does to each trainer that has no line of its own. Options of the contract train those that are fused."""
