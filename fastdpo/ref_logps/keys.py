"""What reference log-probabilities depend on, as one hash: the key that they are stored under."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .adapters import active_adapters, active_parameters
from .module_state import ModuleStates, NotCacheable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from .pairs import Pairs

__all__ = ["NotCacheable", "active_parameters", "config_digest", "key", "model_digest", "tensor_digest", "uncacheable"]

VERSION = "fastdpo.ref_logps/2"
"""Changes with whatever changes the numbers that the same model gives for the same tokens, or how they are stored."""

NOT_NUMBERS = {
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "id2label", "label2id", "problem_type"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "router_aux_loss_coef"),
}
"""Entries of a model's configuration that its hidden states and logits don't depend on."""


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
    """Hash of a model as it would run now: its configuration, `ModuleStates`, and its active adapters.

    A model with its adapters switched off has the digest of the model that they were put on. Parameters of FSDP2 are
    gathered one at a time: then every rank must call this.

    Raises:
        NotCacheable: the model runs functions that can't be identified.
        NotImplementedError: the values of a tensor can't be read.
    """
    states = ModuleStates(model)
    tensors = sorted(states.tensors.items())
    different = list({id(x): (name, x) for name, x in reversed(tensors)}.values())[::-1]
    sharded = any(isinstance(x, DTensor) for _, x in different)
    with ThreadPoolExecutor(1 if sharded else min(8, os.cpu_count() or 1)) as pool:
        digests = list((map if sharded else pool.map)(lambda item: tensor_digest(*item), different))
    of_id = {id(x): digest for (_, x), digest in zip(different, digests, strict=True)}
    of_tensors = [[name, of_id[id(x)]] for name, x in tensors]
    entries = sorted(map(_json, states.entries))
    whole = [config_digest(model.config), of_tensors, entries, active_adapters(model)]
    return hashlib.sha256(_json(whole).encode()).hexdigest()


def uncacheable(model: nn.Module) -> str | None:
    """Returns why values of a model can't be cached, or None if they can. Runs no collective.

    `model` may be wrapped by PEFT, DDP or FSDP2: hooks of the wrappers count as well.
    """
    from .models import base_of

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "FSDP version 1 flattens the parameters of the model"
    base = base_of(model)
    inside = set(base.modules())
    try:
        states = ModuleStates(base)
        known = len(states.entries)
        for name, module in model.named_modules():
            if module not in inside:  # a wrapper of the model
                states.runs(name, module)
    except NotCacheable as error:
        return str(error)
    return None if len(states.entries) == known else f"a wrapper of the model runs {states.entries[-1]}"


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


def _json(x: object) -> str:
    def of_other(x: object) -> object:
        return sorted(map(str, x)) if isinstance(x, (set, frozenset)) else str(x)

    return json.dumps(x, sort_keys=True, default=of_other)
