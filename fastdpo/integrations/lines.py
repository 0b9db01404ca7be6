"""The trainers that are supported, by versions of their packages, and how targets name them. Imports no torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..plain_checks import shown, suggested


class Line(NamedTuple):
    """One trainer in a range of versions.

    Attributes:
        trainer: name of the trainer, which begins with the name of the package that is imported.
        versions: versions of its distribution that are supported.
        module: the module of `fastdpo.integrations` that patches the trainer, a `TrainerLine`.
        trainer_modules: modules that may define the trainer's class.
        by_default: whether `patch()` without targets patches the trainer.
        compared: the functions that may have changed in a version newer than these. The trainer runs them as
            they are, around its model's calls, of which the first are compared with stock ones.
    """

    trainer: str
    versions: str
    module: str
    trainer_modules: tuple[str, ...]
    by_default: bool = True
    compared: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        return self.trainer.partition(".")[0]

    def supports(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(Version(version), prereleases=True)

    def precedes(self, version: str) -> bool:
        """Whether a version is newer than all of the line's."""
        ends = (Version(x.version) for x in SpecifierSet(self.versions) if x.operator in ("<", "<=", "=="))
        return all(Version(version) >= end for end in ends) and not self.supports(version)


DPO_MODULES = ("trl.trainer.dpo_trainer",)
ONLINE_DPO_MODULES = ("trl.experimental.online_dpo.online_dpo_trainer", "trl.trainer.online_dpo_trainer")
SCORING = (
    *("compute_loss", "_compute_loss", "compute_ref_log_probs", "_compute_kl_logps"),
    *("_get_per_token_logps_and_entropies", "use_adapter", "add_fused_lm_head"),
)
"""The functions of TRL since 1.15 that call models with labels, and what gives the models the form that takes them."""
DPO_FUNCTIONS = (*SCORING, "_precompute_ref_logps", "torch_call")

LINES = (
    Line("trl.DPOTrainer", ">=1.15,<1.17", "trl.dpo", DPO_MODULES, compared=DPO_FUNCTIONS),
    Line("trl.DPOTrainer", ">=0.29,<1.15", "trl.dpo_logits", DPO_MODULES),
    Line("trl.DPOTrainer", ">=0.24,<0.29", "trl.dpo_legacy", DPO_MODULES),
    Line("trl.OnlineDPOTrainer", ">=1.15,<1.17", "trl.online_dpo", ONLINE_DPO_MODULES, compared=("training_step",)),
    Line("trl.OnlineDPOTrainer", ">=0.29,<1.15", "trl.online_dpo", ONLINE_DPO_MODULES),
    Line("trl.OnlineDPOTrainer", ">=0.24,<0.29", "trl.online_dpo", ONLINE_DPO_MODULES),
    Line("trl.KTOTrainer", ">=1.15,<1.17", "trl.kto", ("trl.trainer.kto_trainer",), compared=SCORING),
    Line("trl.SFTTrainer", ">=1.15,<1.17", "trl.sft", ("trl.trainer.sft_trainer",), False, SCORING),
    Line("trl.GRPOTrainer", ">=1.15,<1.17", "trl.grpo", ("trl.trainer.grpo_trainer",), False, SCORING),
    Line("trl.RLOOTrainer", ">=1.15,<1.17", "trl.rloo", ("trl.trainer.rloo_trainer",), False, SCORING),
    Line("trl.CPOTrainer", ">=1.15,<1.17", "trl.cpo", ("trl.experimental.cpo.cpo_trainer",), by_default=False),
    Line("trl.ORPOTrainer", ">=1.15,<1.17", "trl.orpo", ("trl.experimental.orpo.orpo_trainer",), by_default=False),
    Line("openrlhf.DPOTrainer", ">=0.9.10,<0.12", "openrlhf.dpo", ("openrlhf.trainer.dpo_trainer",)),
    Line("swift.DPOTrainer", ">=4.6,<4.7", "swift.dpo", ("swift.rlhf_trainers.dpo_trainer",)),
    Line("swift.CPOTrainer", ">=4.6,<4.7", "swift.cpo", ("swift.rlhf_trainers.cpo_trainer",)),
    Line("swift.ORPOTrainer", ">=4.6,<4.7", "swift.orpo", ("swift.rlhf_trainers.orpo_trainer",)),
    Line("swift.KTOTrainer", ">=4.6,<4.7", "swift.kto", ("swift.rlhf_trainers.kto_trainer",)),
    Line("llamafactory.DPOTrainer", "==0.9.5", "llamafactory.dpo", ("llamafactory.train.dpo.trainer",)),
    Line("llamafactory.KTOTrainer", "==0.9.5", "llamafactory.kto", ("llamafactory.train.kto.trainer",)),
)
"""Those of one trainer from the newest versions to the oldest."""

DISTRIBUTIONS = {"swift": "ms-swift"}
"""The distributions of packages, where the names differ."""

CHANGING_OTHERS = ("swift",)
"""Packages whose import changes other packages: ms-swift deletes `__init__` of TRL's trainers. Their
trainers are patched once the program has imported them, or by name.
"""

Target = str | type
"""A trainer by its name or its class, or a package by its name."""

TRAINERS = tuple(dict.fromkeys(line.trainer for line in LINES))
PACKAGES = tuple(dict.fromkeys(line.package for line in LINES))
"""The names of all trainers, and of their packages."""

TRAINS_WITH = {"axolotl": "trl.DPOTrainer"}
"""Programs without trainers of their own, and the trainer that they train with."""


def targeted_trainers(op: str, targets: Sequence[object]) -> list[str]:
    """The names of the trainers that are targeted, by their names or classes, or by their packages.

    A package stands for its trainers that have a line for the installed version. If there are none,
    it stands for all of its trainers, and each has a reason why it cannot be patched.

    Args:
        op: the public function, for its error message.
        targets: names of trainers or packages, trainer classes, or lists of these. None of them:
            the trainers that are patched by default, of the packages that are installed, or of all
            if none is.

    Raises:
        TypeError: a target is neither a name nor a class.
        ValueError: a target is unknown, or a list is empty.
    """
    names = [_target_name(op, target) for target in _flat(op, targets)]
    if names:
        lines = [line for package in PACKAGES if package in names for line in _lines_of(package)]
    else:
        installed = [package for package in PACKAGES if installed_version(package) is not None]
        lines = [line for package in installed or PACKAGES for line in _lines_of(package) if line.by_default]
    chosen = {*names, *(line.trainer for line in lines)}
    return [trainer for trainer in TRAINERS if trainer in chosen]


def _flat(op: str, targets: Sequence[object]) -> Iterator[object]:
    for target in targets:
        if not isinstance(target, list | tuple | set | frozenset):
            yield target
        elif target:
            yield from target
        else:
            raise ValueError(f"{op}: targets must not be empty; got {target}")


def _target_name(op: str, target: object) -> str:
    """The name of a trainer or of a package."""
    rule = f"{op}: targets must be among {', '.join(TRAINERS)} or their packages, by name, or be trainer classes"
    if isinstance(target, str):
        if target in TRAINERS or target in PACKAGES:
            return target
        trainer = TRAINS_WITH.get(target)
        advice = f", which trains with {trainer}" if trainer else suggested(target, (*TRAINERS, *PACKAGES))
        raise ValueError(f"{rule}; got {shown(target)}{advice}")
    if not isinstance(target, type):
        raise TypeError(f"{rule}; got {shown(target)}")
    for line in LINES:
        if target.__module__ in line.trainer_modules and target.__name__.endswith(line.trainer.rpartition(".")[2]):
            return line.trainer
    raise ValueError(f"{rule}; got {target.__module__}.{target.__qualname__}")


def _lines_of(package: str) -> list[Line]:
    """The lines of a package that support the installed version, or all lines if none does."""
    lines = [line for line in LINES if line.package == package]
    version = installed_version(package)
    return [line for line in lines if version is not None and line.supports(version)] or lines


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None
