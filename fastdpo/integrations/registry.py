"""The trainers that are supported, by versions of their packages, and how targets name them. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..checks import shown, suggested
from .admission import packages
from .admission.versions import DISTRIBUTIONS, installed_version

if TYPE_CHECKING:
    from .line import TrainerLine


class Entry(NamedTuple):
    """One trainer in a range of versions, and the `TrainerLine` that patches it.

    Attributes:
        trainer: name of the trainer, which begins with the name of the package that is imported.
        versions: versions of its distribution that are supported.
        line_class: the module in `fastdpo.integrations` and the name of the `TrainerLine` that patches the trainer.
        trainer_module: the module that defines the trainer's class.
        by_default: whether `patch()` without targets patches the trainer. SFT is no preference training.
        is_cut: whether `max_tokens` applies to it.
    """

    trainer: str
    versions: str
    line_class: str
    trainer_module: str
    by_default: bool = True
    is_cut: bool = False

    @property
    def package(self) -> str:
        return self.trainer.partition(".")[0]

    @property
    def distribution(self) -> str:
        return DISTRIBUTIONS.get(self.package, self.package)

    def supports(self, version: str | None) -> bool:
        """Whether the entry supports a version of its distribution. None: it is not installed."""
        return version is not None and SpecifierSet(self.versions).contains(Version(version), prereleases=True)

    def precedes(self, version: str) -> bool:
        """Whether a version, which may be a pre-release, is newer than all of the entry's."""
        ends = (Version(x.version) for x in SpecifierSet(self.versions) if x.operator in ("<", "<=", "=="))
        release = Version(Version(version).base_version)
        return all(release >= end for end in ends) and not self.supports(version)

    def newer(self) -> frozenset[str]:
        """The packages, the trainer's and those that all trainers rely on, that are installed in versions newer than
        the tested ones.
        """
        version = installed_version(self.package)
        is_newer = version is not None and self.precedes(version)
        return frozenset([*packages.newer(), *([self.package] if is_newer else [])])

    def load(self) -> TrainerLine:
        """The trainer line itself. Imports torch."""
        module, _, name = self.line_class.partition(":")
        line_class = getattr(importlib.import_module(f".{module}", __package__), name)
        return line_class(self.trainer, self.trainer_module, self.newer())


DPO = "trl.DPOTrainer"
DPO_MODULE = "trl.trainer.dpo_trainer"
ONLINE_DPO, ONLINE_DPO_LINE = "trl.OnlineDPOTrainer", "trl.online_dpo:OnlineDPOLine"

ALL_TRL, TRL, OPENRLHF, SWIFT, FACTORY = ">=0.24,<1.17", ">=1.15,<1.17", ">=0.9.10,<0.12", ">=4.6,<4.7", "==0.9.5"
TRL_FREE, SWIFT_FREE = "trl.reference_free:ReferenceFreeLine", "swift.reference_free:SwiftReferenceFreeLine"

ENTRIES = (
    Entry(DPO, TRL, "trl.dpo:DPOLine", DPO_MODULE, is_cut=True),
    Entry(DPO, ">=0.29,<1.15", "trl.dpo_logits:LogitsDPOLine", DPO_MODULE, is_cut=True),
    Entry(DPO, ">=0.24,<0.29", "trl.dpo_legacy:LegacyDPOLine", DPO_MODULE),
    Entry(ONLINE_DPO, ">=0.26,<1.17", ONLINE_DPO_LINE, "trl.experimental.online_dpo.online_dpo_trainer"),
    Entry(ONLINE_DPO, ">=0.24,<0.26", ONLINE_DPO_LINE, "trl.trainer.online_dpo_trainer"),
    Entry("trl.KTOTrainer", TRL, "trl.kto:KTOLine", "trl.trainer.kto_trainer", is_cut=True),
    Entry("trl.RewardTrainer", ALL_TRL, "trl.reward:RewardLine", "trl.trainer.reward_trainer", is_cut=True),
    Entry("trl.SFTTrainer", TRL, "trl.sft:SFTLine", "trl.trainer.sft_trainer", False, True),
    Entry("trl.GRPOTrainer", TRL, "trl.groups:GroupLine", "trl.trainer.grpo_trainer", is_cut=True),
    Entry("trl.RLOOTrainer", TRL, "trl.groups:GroupLine", "trl.trainer.rloo_trainer", is_cut=True),
    Entry("trl.CPOTrainer", TRL, TRL_FREE, "trl.experimental.cpo.cpo_trainer"),
    Entry("trl.ORPOTrainer", TRL, TRL_FREE, "trl.experimental.orpo.orpo_trainer"),
    Entry("trl.A2POTrainer", TRL, "trl.a2po:A2POLine", "trl.experimental.a2po.a2po_trainer"),
    Entry("trl.TPOTrainer", TRL, "trl.tpo:TPOLine", "trl.experimental.tpo.tpo_trainer", is_cut=True),
    Entry("openrlhf.DPOTrainer", OPENRLHF, "openrlhf.dpo:OpenRLHFDPOLine", "openrlhf.trainer.dpo_trainer"),
    Entry("openrlhf.RewardModelTrainer", OPENRLHF, "openrlhf.reward:OpenRLHFRewardLine", "openrlhf.trainer.rm_trainer"),
    Entry("swift.DPOTrainer", SWIFT, "swift.dpo:SwiftDPOLine", "swift.rlhf_trainers.dpo_trainer"),
    Entry("swift.CPOTrainer", SWIFT, SWIFT_FREE, "swift.rlhf_trainers.cpo_trainer"),
    Entry("swift.ORPOTrainer", SWIFT, SWIFT_FREE, "swift.rlhf_trainers.orpo_trainer"),
    Entry("swift.KTOTrainer", SWIFT, "swift.kto:SwiftKTOLine", "swift.rlhf_trainers.kto_trainer"),
    Entry("swift.RewardTrainer", SWIFT, "swift.line:SwiftRewardLine", "swift.rlhf_trainers.reward_trainer"),
    Entry("llamafactory.DPOTrainer", FACTORY, "llamafactory.dpo:FactoryDPOLine", "llamafactory.train.dpo.trainer"),
    Entry("llamafactory.KTOTrainer", FACTORY, "llamafactory.kto:FactoryKTOLine", "llamafactory.train.kto.trainer"),
    Entry(
        "llamafactory.PairwiseTrainer",
        FACTORY,
        "llamafactory.reward:FactoryRewardLine",
        "llamafactory.train.rm.trainer",
    ),
)
"""Those of one trainer from the newest versions to the oldest."""

CHANGING_OTHERS = ("swift",)
"""Packages whose import changes other packages: ms-swift deletes `__init__` of TRL's trainers. The doctor imports them
only by name.
"""

Target = str | type
"""A trainer by its name or its class, or a package by its name."""

TRAINERS = tuple(dict.fromkeys(entry.trainer for entry in ENTRIES))
"""The names of all trainers."""

CUT_BY_MAX_TOKENS = tuple(dict.fromkeys(entry.trainer for entry in ENTRIES if entry.is_cut))
"""Those that the option `max_tokens` applies to. The other options apply to all."""

PACKAGES = tuple(dict.fromkeys(entry.package for entry in ENTRIES))
"""Their packages."""

TRAINS_WITH = {"axolotl": ("trl.DPOTrainer", "trl.RewardTrainer")}
"""Programs without trainers of their own, and the trainers that they train with, of those that are known."""


def applies(option: str, trainer: str) -> bool:
    """Whether an option of `patch()` applies to a trainer."""
    return option != "max_tokens" or trainer in CUT_BY_MAX_TOKENS


def entries_of(trainer: str) -> list[Entry]:
    """Those of a trainer, the newest first."""
    return [entry for entry in ENTRIES if entry.trainer == trainer]


def targeted_trainers(op: str, targets: Sequence[object]) -> list[str]:
    """The names of the trainers that are targeted, by their names or classes, or by their packages.

    A package stands for its trainers that have an entry for the installed version. If there are none,
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
        entries = [entry for package in PACKAGES if package in names for entry in _entries_of(package)]
    else:
        installed = [x for x in PACKAGES if installed_version(x) is not None]
        entries = [entry for package in installed or PACKAGES for entry in _entries_of(package) if entry.by_default]
    chosen = {*names, *(entry.trainer for entry in entries)}
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
        trains_with = " and ".join(TRAINS_WITH.get(target, ()))
        advice = f", which trains with {trains_with}" if trains_with else suggested(target, (*TRAINERS, *PACKAGES))
        raise ValueError(f"{rule}; got {shown(target)}{advice}")
    if not isinstance(target, type):
        raise TypeError(f"{rule}; got {shown(target)}")
    for entry in ENTRIES:
        if target.__module__ == entry.trainer_module and target.__name__.endswith(entry.trainer.rpartition(".")[2]):
            return entry.trainer
    raise ValueError(f"{rule}; got {target.__module__}.{target.__qualname__}")


def _entries_of(package: str) -> list[Entry]:
    """The entries of a package that support the installed version, or all entries if none does."""
    entries = [entry for entry in ENTRIES if entry.package == package]
    version = installed_version(package)
    return [entry for entry in entries if entry.supports(version)] or entries
