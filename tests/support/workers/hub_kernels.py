"""Trainings of models whose layers Hugging Face's package `kernels` has replaced.

Usage: `python -m tests.support.workers.hub_kernels DIRECTORY`, with the package first on the path. Saves what each of
`CASES` has computed, and more. The layers are those of `stand_ins.hub_layers`, in a repository on disk.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import fastdpo
from fastdpo.models.examine.comparable import in_evaluation_mode
from fastdpo.models.mixers import finding
from kernels import LocalLayerRepository, Mode, replace_kernel_forward_from_hub, use_kernel_mapping
from tests.support.models.families import HYBRID
from tests.support.stand_ins import hub_layers
from tests.support.trl.dpo import Run, adapter, tiny_model, tokenizer, train
from tests.support.trl.kto import train_kto

USED = dict(model_init_kwargs={"use_kernels": True})

METADATA = {
    "id": "_layers_cpu_1",
    "name": "layers",
    "version": 1,
    "license": "Apache-2.0",
    "python-depends": [],
    "backend": {"type": "cpu"},
}

FUSED = {"RMSNorm": "RMSNorm", "SwiGLUMLP": "SwiGLUMLP", "rotary_pos_emb": ("Rotary", Mode.INFERENCE)}
"""Layers by the names that transformers gives to what they replace. As in its own list for CUDA, rotary embeddings have
a kernel for evaluation only.
"""


@dataclass(frozen=True)
class Case:
    """A training, stock and patched, with layers as in `FUSED`."""

    layers: dict[str, Any]
    kind: str = "llama"
    train: Callable[..., Run] = train
    trainer: str = "trl.DPOTrainer"
    options: dict[str, Any] = field(default_factory=dict)


CONVOLUTIONS = {"causal_conv1d_fn": ("CausalConv1d", Mode.INFERENCE)}

CASES = {
    "DPO": Case(FUSED),
    "DPO lora": Case(FUSED, options=dict(peft_config=adapter()["peft_config"])),
    "KTO": Case(FUSED, train=train_kto, trainer="trl.KTOTrainer"),
    "convolutions": Case(CONVOLUTIONS, "lfm2"),
}


def write_repository(directory: Path) -> Path:
    variant = directory / "build" / "torch-universal"  # also for builds of torch for CUDA
    variant.mkdir(parents=True)
    (variant / "metadata.json").write_text(json.dumps(METADATA))
    (variant / "__init__.py").write_text("from . import layers\n")
    (variant / "layers.py").write_bytes(Path(hub_layers.__file__).read_bytes())
    return directory


def mapped(layers: dict[str, Any], repository: Path):
    def local(layer: str) -> LocalLayerRepository:
        return LocalLayerRepository(repository, layer_name=layer)

    chosen = {name: {x[1]: local(x[0])} if isinstance(x, tuple) else local(x) for name, x in layers.items()}
    return use_kernel_mapping({name: {"cpu": layer} for name, layer in chosen.items()}, inherit_mapping=False)


def saved(directory: Path, kind: str) -> str:
    """The folder of a model and its tokenizer."""
    if not directory.exists():
        tiny_model(kind, **HYBRID[kind][1] if kind in HYBRID else {}).save_pretrained(directory)
        tokenizer().save_pretrained(directory)
    return str(directory)


def run(case: Case, directory: Path) -> dict[str, Any]:
    model = saved(directory.parent / case.kind, case.kind)
    options = dict(max_steps=2, evaluate=4, **USED, **case.options)
    stock = case.train(directory / "stock", model, None, **options)
    with fastdpo.patched(case.trainer):
        patched = case.train(directory / "patched", model, None, **options)
    return {"runs": [vars(replace(x, in_float64=None)) for x in (stock, patched)]}


def functions(directory: Path) -> dict[str, Any]:
    """The functions that get packed tokens from each mixer, in training and in evaluation mode, and in training mode
    after a block in evaluation mode.
    """
    model = AutoModelForCausalLM.from_pretrained(saved(directory / "lfm2", "lfm2"), use_kernels=True)

    def called() -> list[frozenset[str]]:
        return [*map(finding.called_by, finding.mixers_of(model))]

    model.eval()
    found = {"evaluation": called()}
    model.train()
    found["training"] = called()
    with in_evaluation_mode(model):
        pass
    return {**found, "training again": called()}


def main(directory: Path) -> None:
    gc.freeze()  # trainings collect garbage, which takes long among all that is imported
    replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
    repository = write_repository(directory / "repository")
    layers = sys.modules[LocalLayerRepository(repository, layer_name="RMSNorm").load().__module__]
    does = {name: (case.layers, functools.partial(run, case, directory / name)) for name, case in CASES.items()}
    does["functions"] = CONVOLUTIONS, functools.partial(functions, directory)
    for name, (chosen, do) in does.items():
        layers.calls.clear()
        try:
            with mapped(chosen, repository):
                result = do()
        except Exception:
            result = {"error": traceback.format_exc()}
        torch.save({**result, "kernels": Counter(layers.calls)}, directory / f"{name}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
