"""What reference log-probabilities depend on, as one hash: the key that they are stored under."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from .pairs import Pairs

VERSION = "fastdpo.ref_logps/1"
"""Changes with whatever changes the numbers that the same model gives for the same tokens, or how they are stored."""

NOT_NUMBERS = {
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "id2label", "label2id", "problem_type"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "router_aux_loss_coef"),
}
"""Entries of a model's configuration that its hidden states and logits don't depend on."""

NOT_NUMBERS_OF_ADAPTERS = {
    *("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "task_type"),
    *("init_lora_weights", "lora_dropout"),
}


def key(pairs: Pairs, model: str, precision: str, ld_alpha: float | None) -> str:
    """The key of the values of these pairs under a model with this digest, run in this precision."""
    parts = {
        "version": VERSION,
        "model": model,
        "precision": precision,
        "tokens": pairs.digest,
        "max_length": pairs.max_length,
        "truncation_mode": None if pairs.max_length is None else pairs.truncation_mode,
        "ld_alpha": ld_alpha,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def config_digest(config: PretrainedConfig) -> str:
    entries = {name: x for name, x in config.to_dict().items() if name not in NOT_NUMBERS}
    return hashlib.sha256(_json(entries).encode()).hexdigest()


def model_digest(model: PreTrainedModel) -> str:
    """Of a model as it would run now: its configuration, its tensors, and the adapters that are active.

    A model with its adapters switched off has the digest of the model that they were put on. Parameters of FSDP2 are
    gathered one at a time: then every rank must call this.

    Raises:
        NotImplementedError: the values of a tensor can't be read.
    """
    inactive = _InactiveAdapters(model)
    state = [(_unwrapped(name), x) for name, x in model.state_dict().items() if isinstance(x, Tensor)]
    state = sorted((item for item in state if item[0] not in inactive), key=lambda item: item[0])
    sharded = any(isinstance(x, DTensor) for _, x in state)
    with ThreadPoolExecutor(1 if sharded else min(8, os.cpu_count() or 1)) as pool:
        of_tensors = list((map if sharded else pool.map)(lambda item: [item[0], tensor_digest(*item)], state))
    whole = [config_digest(model.config), of_tensors, _active_adapters(model)]
    return hashlib.sha256(_json(whole).encode()).hexdigest()


def active_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those of the model as it would run now: without those of adapters that are off."""
    inactive = _InactiveAdapters(model)
    return [x for name, x in model.named_parameters() if _unwrapped(name) not in inactive]


def tensor_digest(name: str, tensor: Tensor) -> str:
    """Of a tensor's dtype, shape and bytes."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter) or hasattr(tensor, "ds_id"):
        kind = "on the meta device" if tensor.is_meta else type(tensor).__name__
        raise NotImplementedError(
            f"precompute: the values of {name} can't be read for the cache's key: it is {kind}. "
            "Call it before the model is offloaded or sharded by ZeRO-3, or without cache_dir"
        )
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _unwrapped(name: str) -> str:
    """The name that a parameter had before PEFT wrapped its module."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def _adapter_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            yield _unwrapped(name), module


def _active(module) -> set[str]:
    return set() if module.disable_adapters else set(module.active_adapters)


class _InactiveAdapters:
    """Names of tensors that belong to an adapter which is not active: `module.container.adapter...`."""

    def __init__(self, model: nn.Module):
        self.modules: dict[str, tuple[set[str], set[str]]] = {}
        for name, module in _adapter_modules(model):
            containers = (*module.adapter_layer_names, *getattr(module, "other_param_names", ()))
            self.modules[name] = ({container.split(".")[0] for container in containers}, _active(module))

    def __contains__(self, name: str) -> bool:
        parts = name.split(".")
        for i in range(len(parts) - 2, 0, -1):
            containers, active = self.modules.get(".".join(parts[:i]), (set(), set()))
            if parts[i] in containers:
                return parts[i + 1] not in active
        return False


def _active_adapters(model: nn.Module) -> dict[str, object]:
    """Name to configuration."""
    active: set[str] = set().union(*(_active(module) for _, module in _adapter_modules(model)))
    configs = [vars(module).get("peft_config") or {} for module in model.modules()]
    return {
        name: {entry: x for entry, x in config.to_dict().items() if entry not in NOT_NUMBERS_OF_ADAPTERS}
        for each in configs
        for name, config in each.items()
        if name in active
    }


def _json(x: object) -> str:
    def of_other(x: object) -> object:
        return sorted(map(str, x)) if isinstance(x, (set, frozenset)) else str(x)

    return json.dumps(x, sort_keys=True, default=of_other)
