"""Adapters that are added, set, merged and deleted, in and out of `disable_adapter`: after each operation, a prepared
model is what it would be by PEFT alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftModel, VeraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fastdpo
from tests.support.fuzzing import SEEDS, fuzzed

TARGETS = dict(target_modules=["q_proj", "down_proj"])
LORA = dict(r=2, init_lora_weights=False, **TARGETS)
KINDS = {
    "LoRA": LoraConfig(**LORA),
    "DoRA": LoraConfig(**LORA, use_dora=True),
    "biases": LoraConfig(**LORA, bias="lora_only"),
    "IA3": IA3Config(**TARGETS, feedforward_modules=["down_proj"], init_ia3_weights=False),
    "VeRA": VeraConfig(r=2, init_weights=False, **TARGETS),
    "layer norms": LNTuningConfig(target_modules=["norm"]),
    "saved modules": LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "trained tokens": LoraConfig(**LORA, trainable_token_indices=[1, 2]),
}
NAMES = ("default", "a", "b")  # the last one is not there in the beginning
IDS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 3, 1]])


class Adapters(NamedTuple):
    """Operations on a model with two adapters, after a first block.

    Attributes:
        kind: of its adapters.
        operations: names of `OPERATIONS`, and the adapter that each is about.
    """

    seed: int
    kind: str
    operations: list[tuple[str, str]]


class Side:
    """A model and what has become of it.

    Attributes:
        blocks: contexts of `disable_adapter` that were entered and not left.
        seen: the state after each operation.
    """

    def __init__(self, kind: str, prepares: bool):
        torch.manual_seed(0)
        sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1)
        base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).double()
        self.model = get_peft_model(base, copy.deepcopy(KINDS[kind]))
        self.prepares, self.blocks, self.seen = prepares, [], []
        if prepares:
            fastdpo.prepare(self.model)

    def run(self, operation: str, adapter: str, seed: int) -> list[Tensor]:
        """Runs an operation and appends the state after it. Returns log-probabilities of rows, and gradients."""
        torch.manual_seed(seed)
        result, error = None, None
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                result = OPERATIONS[operation](self, adapter)
            except Exception as raised:  # as PEFT raises for an adapter that is not there
                error = f"{type(raised).__name__}: {raised}"
        self.seen.append((operation, adapter, error, {str(x.message) for x in warned}, *state_of(self.model)))
        return result or []

    def score(self, adapter: str) -> list[Tensor]:
        mask = torch.ones_like(IDS)
        if self.prepares:
            sums = fastdpo.score(self.model, IDS, mask, IDS).sums()
        else:
            logps = self.model(input_ids=IDS, attention_mask=mask).logits.log_softmax(-1)[:, :-1]
            sums = logps.gather(-1, IDS[:, 1:, None])[..., 0].sum(1)
        trained = [x for x in self.model.parameters() if x.requires_grad]
        if not (trained and sums.requires_grad):
            return [sums.detach()]
        gradients = torch.autograd.grad(sums.sum(), trained, allow_unused=True)
        return [sums.detach(), *(torch.zeros(()) if x is None else x for x in gradients)]

    def enter(self, adapter: str) -> None:
        block = self.model.disable_adapter()
        block.__enter__()
        self.blocks.append(block)

    def leave(self, adapter: str) -> None:
        if self.blocks:
            self.blocks.pop().__exit__(None, None, None)

    def break_off(self, adapter: str) -> None:
        error = ZeroDivisionError()
        if self.blocks:
            assert not self.blocks.pop().__exit__(ZeroDivisionError, error, None)

    def copy(self, adapter: str) -> None:
        if not self.blocks:
            self.model = copy.deepcopy(self.model)
            if self.prepares:
                fastdpo.prepare(self.model)


def of_model(name: str, *others: Any) -> Callable[[Side, str], None]:
    """An operation that is a function of the PeftModel and takes an adapter and other arguments."""
    return lambda side, adapter: getattr(side.model, name)(adapter, *others)


def of_tuner(name: str, *args: Any) -> Callable[[Side, str], None]:
    """An operation that is a function of the tuner, and takes these arguments."""
    return lambda side, adapter: getattr(side.model.base_model, name)(*args)


def freeze_one(side: Side, adapter: str) -> None:
    next(x for name, x in side.model.named_parameters() if f".{adapter}" in name).requires_grad_(False)


def set_and_extend(side: Side, adapter: str) -> None:
    """Sets adapters by a list that changes afterwards."""
    names = [adapter]
    side.model.base_model.set_adapter(names)
    names.append("default")


OPERATIONS: dict[str, Callable[[Side, str], Any]] = {
    "enter": Side.enter,
    "leave": Side.leave,
    "break off": Side.break_off,
    "score": Side.score,
    "copy": Side.copy,
    "add": lambda side, adapter: side.model.add_adapter(adapter, copy.copy(side.model.peft_config["default"])),
    "set": of_model("set_adapter"),
    "set frozen": of_model("set_adapter", True),
    "set two": lambda side, adapter: side.model.base_model.set_adapter(["default", adapter]),
    "set and extend": set_and_extend,
    "delete": of_model("delete_adapter"),
    "train": of_model("set_requires_grad"),
    "freeze": of_model("set_requires_grad", False),
    "freeze one": freeze_one,
    "merge": of_tuner("merge_adapter"),
    "unmerge": of_tuner("unmerge_adapter"),
    "enable": of_tuner("enable_adapter_layers"),
    "disable": of_tuner("disable_adapter_layers"),
    "disable one": lambda side, adapter: next(_layers(side.model)).enable_adapters(False),
    "evaluate": lambda side, adapter: side.model.eval() and None,
}
STEPS = st.tuples(st.sampled_from(["enter", "leave", "set"]), st.sampled_from(NAMES[:2]))
OTHERS = st.tuples(st.sampled_from([*OPERATIONS]), st.sampled_from(NAMES))
PROGRAMS = st.builds(
    Adapters,
    seed=SEEDS,
    kind=st.sampled_from([*KINDS]),
    operations=st.lists(st.one_of(STEPS, OTHERS), min_size=1, max_size=10),
)
BEFORE = ("add", "a"), ("enter", ""), ("leave", "")
AFTER = ("leave", ""), ("set", "default"), ("enter", ""), ("leave", ""), ("score", "")


def _layers(model: PeftModel):
    return (module for module in model.modules() if hasattr(module, "_disable_adapters"))


def state_of(model: PeftModel) -> tuple:
    """What can be read from a PeftModel, and the logits of its own forward."""
    try:
        status = model.get_model_status()
    except Exception as error:
        status = f"{type(error).__name__}: {error}"
    layers = [(x.disable_adapters, x._active_adapter, getattr(x, "merged_adapters", None)) for x in _layers(model)]
    try:
        with torch.no_grad():
            logits = model(input_ids=IDS).logits.tolist()
    except Exception as error:
        logits = f"{type(error).__name__}: {error}"
    return (
        copy.deepcopy(layers),
        {name: x.requires_grad for name, x in model.named_parameters()},
        (model.active_adapter, [*model.active_adapters], copy.copy(model.base_model.active_adapter)),
        (model._adapters_disabled, model.training, [*model.peft_config]),
        status,
        logits,
    )


def check_adapters(case: Adapters) -> None:
    stock, fused = (Side(case.kind, prepares) for prepares in (False, True))
    for i, (operation, adapter) in enumerate([*BEFORE, *case.operations, *AFTER]):
        expected, found = (side.run(operation, adapter, case.seed + i) for side in (stock, fused))
        assert fused.seen[-1] == stock.seen[-1]
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)


test_adapters = fuzzed(PROGRAMS, 0.008)(check_adapters)
