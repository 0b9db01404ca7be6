"""What fastdpo relies on in torch, transformers, accelerate and PEFT, under whichever trainer.

All of their versions are supported. A name that is missing is a reason to leave all trainers as they are.
In a version newer than the tested one, functions that have changed lead to the comparison of each model's
first calls with stock ones.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from packaging.version import Version

from ...reasons import Reason
from . import evidence, fingerprints
from .versions import installed_version


class Package(NamedTuple):
    """What is relied on in a package.

    Attributes:
        tested: the newest version that was tested.
        names: of what must be there, by module.
        compared: the functions among them whose code matters.
    """

    tested: str
    names: dict[str, tuple[str, ...]]
    compared: tuple[str, ...] = ()


PACKAGES = {
    "torch": Package(
        "2.13.0",
        {"torch.distributed.fsdp": ("FSDPModule",), "torch.distributed.tensor": ("DTensor", "Shard", "Replicate")},
    ),
    "transformers": Package(
        "5.23.0",
        {
            "transformers.modeling_utils": (
                *("ALL_ATTENTION_FUNCTIONS.register", "AttentionInterface"),
                *("PreTrainedModel.set_attn_implementation", "PreTrainedModel._can_set_attn_implementation"),
                *("PreTrainedModel.get_output_embeddings", "PreTrainedModel.get_input_embeddings"),
            ),
            "transformers.masking_utils": ("ALL_MASK_ATTENTION_FUNCTIONS.register", "AttentionMaskInterface"),
            "transformers.configuration_utils": (
                *("PretrainedConfig._attn_implementation", "PretrainedConfig.get_text_config"),
            ),
            "transformers.models.mixtral.modeling_mixtral": ("load_balancing_loss_func",),
        },
        ("PreTrainedModel._can_set_attn_implementation", "load_balancing_loss_func"),
    ),
    "accelerate": Package(
        "1.15.0",
        {
            "accelerate.accelerator": ("Accelerator.gather", "Accelerator.gather_for_metrics"),
            "accelerate.data_loader": (
                *("BatchSamplerShard._iter_with_no_split", "SeedableRandomSampler.__iter__"),
                *("DataLoaderShard", "DataLoaderDispatcher"),
            ),
            "accelerate.utils": (
                *("broadcast_object_list", "extract_model_from_parallel", "is_peft_model", "send_to_device"),
            ),
            "accelerate.state": ("AcceleratorState._shared_state",),
        },
        ("Accelerator.gather", "Accelerator.gather_for_metrics"),
    ),
    "peft": Package(
        "0.21.2",
        {
            "peft.tuners.tuners_utils": ("BaseTunerLayer.disable_adapters", "BaseTunerLayer.active_adapters"),
            "peft.utils.other": ("AuxiliaryTrainingWrapper",),
        },
    ),
}


def is_newer(package: str) -> bool:
    """Whether the installed version is newer than the tested one."""
    version = installed_version(package)
    return version is not None and Version(Version(version).public) > Version(PACKAGES[package].tested)


def newer() -> list[str]:
    """The packages that are installed in a version newer than the tested one."""
    return [package for package in PACKAGES if is_newer(package)]


def missing_reason(packages: tuple[str, ...] = tuple(PACKAGES)) -> Reason | None:
    """Which name is missing in the installed packages, or None. Looks into modules that have been imported."""
    for package in packages:
        for name, value in _values(package):
            if value is None:
                return Reason("missing-name", package=f"{package} {installed_version(package)}", missing=name)
    return None


def changed(packages: Iterable[str]) -> dict[str, list[str]]:
    """By package, of those in a newer version: the functions that differ.

    `evidence.is_allowed` does not matter here: these versions were supported before their code was known.
    """
    compared = {package: _compared(package) for package in packages}
    found = {
        package: [name for name, x in functions.items() if not evidence.is_recorded(name, x)]
        for package, functions in compared.items()
    }
    return {package: names for package, names in found.items() if names}


def functions_of(package: str) -> dict[str, object]:
    """The functions of the table whose code matters, by their dotted names, of modules that can be imported."""
    for module in PACKAGES[package].names:
        importlib.import_module(module)
    return _compared(package)


def _compared(package: str) -> dict[str, object]:
    """Those of imported modules."""
    names = PACKAGES[package].compared
    functions = {name: x for name, x in _values(package) if name.partition(":")[2] in names and x is not None}
    return {
        name.replace(":", "."): fingerprints.inner(x.fget if isinstance(x, property) else x)
        for name, x in functions.items()
    }


def description(package: str) -> str:
    """Whether the installed version was tested, or what is known of it, for the report of the doctor."""
    tested = PACKAGES[package].tested
    if not is_newer(package):
        same = Version(installed_version(package) or "0").public == tested
        return "tested" if same else f"older than the newest tested version, {tested}"
    names = changed((package,)).get(package)
    known = "whose code is the same where it is compared"
    if names:
        known = f"where {', '.join(names)} differs: first calls are compared with stock ones"
    return f"provisionally, newer than the tested version, {tested}, {known}"


def _values(package: str) -> Iterator[tuple[str, object]]:
    """The names of a package, as "module:name", with their values, or None, in imported modules."""
    if package not in sys.modules:
        return
    for module, names in PACKAGES[package].names.items():
        if module in sys.modules:
            for name in names:
                yield f"{module}:{name}", fingerprints.attribute_of(sys.modules[module], name)
