"""Probes and trains models that bitsandbytes or torchao has quantized.

Usage: `python -m tests.support.workers.quantized FILE`, with the packages on the path. Saves the results as JSON.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from trl import DPOTrainer

import fastdpo
from fastdpo.models import attention
from fastdpo.models.examine import probe
from tests.support.comparison import differences_of_gradients, largest
from tests.support.models.trained_effects import position_in_training
from tests.support.recorded_messages import recorded_messages
from tests.support.trl.dpo import Run, adapter, tiny_model, tokenizer, train, trained_adapter

CPU = torch.device("cpu")

BITS = {
    4: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    8: BitsAndBytesConfig(load_in_8bit=True),
}


def contents(x: Any, depth: int = 3) -> Any:
    """The value of a parameter, of a buffer or of an attribute, in a form that can be compared."""
    if isinstance(x, Tensor):
        inner = {name: contents(value, depth - 1) for name, value in vars(x).items()}
        plain = x.dequantize() if type(x).__module__.startswith("torchao") else x.detach()
        return str(plain.dtype), plain.flatten().view(torch.uint8).tolist(), inner
    if hasattr(x, "__dict__") and not isinstance(x, nn.Module | type) and not callable(x) and depth:
        return {name: contents(value, depth - 1) for name, value in vars(x).items()}
    return repr(x) if isinstance(x, bool | int | float | str | torch.dtype | None) else type(x).__name__


def modules_of(model: nn.Module) -> dict[str, Any]:
    return {
        name: [
            {key: contents(x) for key, x in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")},
            *({key: contents(x) for key, x in own.items()} for own in (module._parameters, module._buffers)),
        ]
        for name, module in model.named_modules()
    }


def saved(directory: Path) -> str:
    if not directory.exists():
        tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(directory)
        tokenizer().save_pretrained(directory)
    return str(directory)


def by_bitsandbytes(bits: int, directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(saved(directory), quantization_config=BITS[bits], dtype=torch.float32)


def is_in_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


def by_torchao(directory: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(saved(directory), dtype=torch.float32)
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_in_layer)
    return model


def in_float8(model: PreTrainedModel, recipe: str) -> None:
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_in_layer)


def probed(load: Callable[[Path], PreTrainedModel], directory: Path) -> dict[str, list]:
    """What probes of a model with an adapter, and of one without, in both modes, change in it, and their reasons."""
    changed, reasons = [], []
    for with_adapter in (True, False):
        model = load(directory)
        wrapped = trained_adapter(model) if with_adapter else model.requires_grad_(False)
        attention.switch(model)
        for is_training in (True, False):
            wrapped.train(is_training)
            before = modules_of(wrapped)
            reason = probe.probe(model, CPU).unsupported_reason or probe.head_difference(model, CPU)
            reasons += [(is_training, reason.name)] if reason else []
            after = modules_of(wrapped)
            changed += [name for name in before if before[name] != after[name]]
        attention.restore(model)
    return {"changed": changed, "reasons": reasons}


def hooked(**options: Any) -> DPOTrainer:
    trainer = DPOTrainer(**options)
    position_in_training(trainer.model.get_base_model())
    return trainer


def outcome(train_once: Callable[[str], Run]) -> dict[str, Any]:
    """What a training, stock and patched, gives: calls, the difference of the first gradients, and messages."""
    messages = recorded_messages()
    stock = train_once("stock")
    with fastdpo.patched("trl.DPOTrainer"):
        patched = train_once("patched")
    worst = largest(differences_of_gradients(stock.gradients[:1], patched.gradients[:1], relative=0.03))
    calls = {" ".join(key): n for key, n in patched.calls.items()}
    return dict(calls=calls, difference=worst.size, worst=worst.description, messages=messages)


def main(file: Path) -> None:
    directory = Path(tempfile.mkdtemp())
    results: dict[str, Any] = {"probed": {}, "trainings": {}}
    loads = {f"bitsandbytes, {bits} bits": functools.partial(by_bitsandbytes, bits) for bits in BITS}
    for name, load in {**loads, "torchao, int8": by_torchao}.items():
        results["probed"][name] = probed(load, directory / "model")

    def qlora(bits: int, trainer_class: Any, name: str) -> Run:
        torch.manual_seed(0)
        options = dict(model_init_kwargs=dict(dtype="float32", quantization_config=BITS[bits]), max_steps=2)
        peft_config = adapter()["peft_config"]
        model = saved(directory / "model")
        place = directory / f"{bits}{trainer_class.__name__}" / name
        return train(place, model, None, trainer_class=trainer_class, peft_config=peft_config, **options)

    def float8(recipe: str, name: str) -> Run:
        models = [tiny_model(seed=seed, hidden_size=64, intermediate_size=128, head_dim=16) for seed in range(2)]
        for model in models:
            in_float8(model, recipe)
        return train(directory / recipe / name, *models, max_steps=2)

    for bits in BITS:
        results["trainings"][f"{bits} bits"] = outcome(functools.partial(qlora, bits, DPOTrainer))
        results["trainings"][f"{bits} bits, hook"] = outcome(functools.partial(qlora, bits, hooked))
    for recipe in ("tensorwise", "rowwise"):
        results["trainings"][f"float8, {recipe}"] = outcome(functools.partial(float8, recipe))
    file.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
