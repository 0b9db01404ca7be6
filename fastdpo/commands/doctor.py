"""What this machine can do with fastdpo, and whether what was asked for is available.

fastdpo doctor [--json] [--model PATH] [TRAINER ...]
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from packaging.requirements import Requirement

from .. import __version__
from ..integrations import patching
from ..integrations.admission import packages
from ..integrations.admission.versions import installed_version
from ..integrations.registry import ENTRIES, TRAINS_WITH
from ..models import forward
from ..models.reward_head import CLASSIFIER_HEAD
from ..models.state import ForwardOptions
from ..ops import memory
from ..ops.attention import routes
from ..ops.attention import trials as attention_trials
from ..ops.attention.device_layout import AttentionOptions, Kind
from ..ops.choice import notes, tuning, verdicts
from ..ops.devices import architecture, suits_triton
from ..ops.head import trials as head_trials
from ..packing import IGNORE_INDEX
from .model_names import CLASSIFIER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OK, OFF, FAILED = "ok", "off", "failed"
NAME = "fastdpo.doctor"
OPTIONAL = ("transformers", "accelerate", "peft", "datasets", "deepspeed", "axolotl", "flash-attn")
"""Packages next to those of trainers."""


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        status: "ok", "off" (not available, and not asked for) or "failed".
        name: what was looked at.
        detail: what was found, or the reason.
    """

    status: str
    name: str
    detail: str = ""


Report = dict[str, list[Finding]]
"""The findings by section."""


def examine(targets: Sequence[str] = (), model: str | None = None) -> Report:
    """Examines this machine.

    Args:
        targets: trainers or packages that must be patchable, as for `patch`. Without any, those
            that `patch()` patches are looked at, and none of them must be.
        model: path or name of a model that must pack and fuse.

    Raises:
        ValueError: a target is unknown.
    """
    report = {"packages": list(package_findings()), "devices": list(_devices()), "trainers": list(_trainers(targets))}
    for device in _torch_devices():
        report[f"attention on {device}"] = list(_attention(device))
        if memory.is_on(device):
            report[f"memory of {device}"] = list(memory_findings(device))
        if suits_triton(device, torch.bfloat16):
            report[f"kernels on {device}"] = list(kernel_findings(device))
            report[f"choices on {device}"] = list(choice_findings(device))
    if model is not None:
        report[f"model {model}"] = list(_model(model))
    return report


def failed(report: Report) -> bool:
    return any(finding.status == FAILED for findings in report.values() for finding in findings)


def as_text(report: Report) -> str:
    """The report for a terminal, a section at a time."""
    lines = []
    for section, findings in report.items():
        width = max(len(finding.name) for finding in findings)
        lines += ["", section]
        lines += [f"  {x.status:<7} {x.name:<{width}}  {x.detail}".rstrip() for x in findings]
    return "\n".join(lines[1:])


def as_json(report: Report) -> str:
    sections = {section: [x._asdict() for x in findings] for section, findings in report.items()}
    return json.dumps({"ok": not failed(report), "sections": sections}, indent=2)


def package_findings() -> Iterator[Finding]:
    yield _as_a_script_sees_it()
    yield Finding(OK, "python", platform.python_version())
    try:
        requirements = importlib.metadata.requires("fastdpo") or ()
    except importlib.metadata.PackageNotFoundError:
        yield Finding(OFF, "requirements", "not checked: fastdpo runs from its sources and is not installed")
        requirements = ()
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            known = f": {packages.description(requirement.name)}" if requirement.name in packages.TESTED else ""
            yield Finding(OK, requirement.name, f"{version} ({requirement.specifier}){known}")
        else:
            got = f"{version or 'not installed'}; fastdpo requires {requirement.specifier}"
            yield Finding(FAILED, requirement.name, got)
    for package in dict.fromkeys((*(entry.distribution for entry in ENTRIES), *OPTIONAL)):
        version = installed_version(package)
        yield Finding(OFF, package, "not installed") if version is None else _optional(package, version)


def _as_a_script_sees_it() -> Finding:
    """This package, and whether a script in the working directory imports it."""
    here, directory = Path(__file__).parents[1], Path.cwd()
    spec = PathFinder.find_spec("fastdpo", [str(directory), *sys.path])
    other = None if spec is None else spec.origin  # None for a folder, which hides no package
    if other is None or Path(other).resolve() == (here / "__init__.py").resolve():
        return Finding(OK, "fastdpo", f"{__version__}, {here}")
    return Finding(FAILED, "fastdpo", f"{__version__}, {here}, but a script in {directory} imports {other}: rename it")


def _optional(package: str, version: str) -> Finding:
    """An installed package, and whether its version was tested."""
    if package in packages.TESTED:
        reason = packages.missing_reason((package,))
        known = packages.description(package) if reason is None else f"off, {reason.named}"
        return Finding(OK if reason is None else OFF, package, f"{version}: {known}")
    entries = [entry for entry in ENTRIES if entry.distribution == package]
    if not entries:
        trains_with = " and ".join(TRAINS_WITH.get(package, ()))
        return Finding(OK, package, f"{version}: trains with {trains_with}" if trains_with else version)
    if any(entry.supports(version) for entry in entries):
        return Finding(OK, package, f"{version}: tested")
    seams = patching.examine([entry.trainer for entry in entries]).seams
    found = next((seam for seam in seams if seam.on), seams[0])
    provisionally = "provisionally, newer than the tested versions: first calls are compared with stock ones"
    known = provisionally if found.reason is None else f"off, {found.reason.named}"
    return Finding(OK if found.on else OFF, package, f"{version}: {known}")


def _torch_devices() -> list[torch.device]:
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in gpus)]


def _devices() -> Iterator[Finding]:
    yield Finding(OK, "cpu", f"{torch.get_num_threads()} threads, {platform.machine()}")
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    if not (torch.version.cuda or torch.version.hip):
        yield Finding(OFF, "cuda", "this build of torch is for CPUs")
    elif not torch.cuda.is_available():
        yield Finding(OFF, "cuda", f"torch is built for {built_for}, but finds no GPU")
    for device in _torch_devices()[1:]:
        properties = torch.cuda.get_device_properties(device)
        size = properties.total_memory / 2**30
        yield Finding(OK, str(device), f"{properties.name}, {architecture(device)}, {size:.0f} GiB, {built_for}")


def _trainers(targets: Sequence[str]) -> Iterator[Finding]:
    for seam in patching.examine(*targets).seams:
        status = OK if seam.on else FAILED if targets else OFF
        why = seam.reason.named if seam.reason else "" if seam.imported else "patched when imported"
        yield Finding(status, seam.name, ": ".join(filter(None, (seam.version, why))))


def _attention(device: torch.device) -> Iterator[Finding]:
    """The backends for a usual call, in the order of preference. The
    first that is available is used.
    """
    if not suits_triton(device, torch.bfloat16):
        yield Finding(OK, "torch", "in pieces, by torch's flash attention or by matrix products")
        return
    query = torch.empty(16, 8, 128, dtype=torch.bfloat16, device=device)
    kind = Kind.of(query, query, AttentionOptions(128**-0.5, None, None))
    for name, backend in routes.BACKENDS.items():
        reason = backend.unsupported_reason(kind) or routes.failure(name, kind)
        yield Finding(OK, name) if reason is None else Finding(OFF, name, reason)


def kernel_findings(device: torch.device) -> Iterator[Finding]:
    """Whether fastdpo's own kernels work. Where one does not, its op computes with PyTorch."""
    attention = partial(attention_trials.packed_attention, routes.OWN.call, d=128, d_v=128)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kernels: dict[str, verdicts.Trial] = {**head_trials.OF_LOGITS}
        if dtype != torch.float32:
            kernels["packed_attention"] = attention
        for kernel, trial in kernels.items():
            reason = verdicts.outcome(trial, device, dtype)
            name = f"{kernel}, {str(dtype).removeprefix('torch.')}"
            yield Finding(OK, name) if reason is None else Finding(FAILED, name, reason)


def memory_findings(device: torch.device) -> Iterator[Finding]:
    """What this process may use of a device, and who spends it, those that give back last first."""
    now = memory.report(device)
    if now is not None:
        yield Finding(OK, "free", f"{now.limit - now.used:,.0f} bytes, of {now.total:,} in all")
        yield from (Finding(OK, name, rule) for name, rule in memory.SPENDERS.items())


def choice_findings(device: torch.device) -> Iterator[Finding]:
    """The measured choices between kernels that are noted for later processes."""
    if not tuning.is_on(device):
        yield Finding(OFF, "built-in", f"nothing is measured with {tuning.VARIABLE}=0 or deterministic algorithms")
        return
    choices = tuning.noted(device)
    if not choices:
        yield Finding(OK, "none", "a training makes them at its first batches")
    for call, choice in choices.items():
        yield Finding(OK, call, str(choice))
    for model, noted in notes.read(device).layers.items():
        found = f"compiling them takes {noted.seconds:.0f} s, and saves {noted.saving:.0%} of a step"
        yield Finding(OK, f"compiled layers of {model}", found)


def _model(path: str) -> Iterator[Finding]:
    """Whether a model packs, by one training call on a pair of random rows with a common prompt."""
    import transformers

    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(path)
    kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
    device = _torch_devices()[-1]
    yield from model_findings(kind.from_pretrained(path, dtype="auto").to(device))


def model_findings(model: PreTrainedModel) -> Iterator[Finding]:
    """What `_model` finds of a loaded model, a causal LM or a reward model."""
    rewards = type(model).__name__.endswith(CLASSIFIER)
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (2, 24), generator=torch.Generator().manual_seed(0), device="cpu").to(model.device)
    ids[1, :16] = ids[0, :16]
    labels = ids.clone()
    labels[:, : -1 if rewards else 16] = IGNORE_INDEX  # a reward model scores the last token of each row
    batches = []
    options = ForwardOptions(NAME, "policy", rewards=CLASSIFIER_HEAD if rewards else None)
    forward.install(model, options, lambda batch, kwargs: batches.append(batch), prior_scores=False)
    call = {"shift_labels": labels} if rewards else {"labels": labels, "fused_lm_head": True}
    was_training = model.training
    try:
        with torch.no_grad():
            model.train()
            model(input_ids=ids, attention_mask=torch.ones_like(ids), **call)
        reasons = forward.logged_reasons(model, NAME)
        is_random = forward.is_random(model, NAME)
    finally:
        model.train(was_training)
        forward.uninstall_all(NAME)
    what = "packing" if rewards else "packing and fused head"
    if not batches:
        yield Finding(FAILED, what, "; ".join(sorted(reason.named for reason in reasons)))
        return
    yield Finding(OK, what, type(model).__name__)
    yield Finding(OK, "shared prompts", "one dropout mask for both rows" if is_random else "")
