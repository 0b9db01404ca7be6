"""What fastdpo relies on in torch, transformers, accelerate and PEFT, under whichever trainer.

All of their versions are supported. A name that is missing is a reason to leave all trainers as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from packaging.version import Version

from ...reasons import Reason
from .signatures import attribute_of
from .versions import installed_version

TESTED = {"torch": "2.15.0", "transformers": "5.24.0", "accelerate": "1.15.0", "peft": "0.21.2"}
"""The packages, and the newest version of each that was tested."""

NAMES = {
    "torch.distributed.fsdp": ("FSDPModule",),
    "torch.distributed.tensor": ("DTensor", "Shard", "Replicate"),
    "transformers.modeling_utils": (
        *("ALL_ATTENTION_FUNCTIONS.register", "AttentionInterface"),
        *("PreTrainedModel.get_output_embeddings", "PreTrainedModel.get_input_embeddings"),
        "PreTrainedModel._can_set_attn_implementation",
    ),
    "transformers.masking_utils": ("ALL_MASK_ATTENTION_FUNCTIONS.register", "AttentionMaskInterface"),
    "transformers.configuration_utils": ("PretrainedConfig._attn_implementation", "PretrainedConfig.get_text_config"),
    "transformers.models.mixtral.modeling_mixtral": ("load_balancing_loss_func",),
    "accelerate.accelerator": ("Accelerator.gather", "Accelerator.gather_for_metrics"),
    "accelerate.data_loader": ("BatchSamplerShard._iter_with_no_split",),
    "accelerate.utils": ("extract_model_from_parallel", "is_peft_model", "send_to_device"),
    "accelerate.state": ("AcceleratorState._shared_state",),
    "peft.tuners.tuners_utils": ("BaseTunerLayer.disable_adapters", "BaseTunerLayer.active_adapters"),
    "peft.utils.other": ("AuxiliaryTrainingWrapper",),
}
"""The names that must be there, by module."""


def is_newer(package: str) -> bool:
    """Whether the installed version is newer than the tested one."""
    version = installed_version(package)
    return version is not None and Version(Version(version).public) > Version(TESTED[package])


def newer() -> list[str]:
    """The packages that are installed in a version newer than the tested one."""
    return [package for package in TESTED if is_newer(package)]


def missing_reason(packages: Collection[str] = TESTED) -> Reason | None:
    """Which name is missing in the installed packages, or None. Looks into modules that have been imported."""
    for module, names in NAMES.items():
        package = module.partition(".")[0]
        for name in names if package in packages and module in sys.modules else ():
            if attribute_of(sys.modules[module], name) is None:
                described = f"{package} {installed_version(package)}"
                return Reason("missing-name", package=described, missing=f"{module}:{name}")
    return None


def description(package: str) -> str:
    """Whether the installed version was tested, for the report of the doctor."""
    tested = TESTED[package]
    if is_newer(package):
        return f"provisionally, newer than the tested version, {tested}"
    is_same = Version(installed_version(package) or "0").public == tested
    return "tested" if is_same else f"tested up to {tested}"
