"""Hashes of configurations and tensors."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..models.identity.harmless import CONFIG_ENTRIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def config_digest(config: PretrainedConfig) -> str:
    """Hash of the entries of a configuration that outputs depend on."""
    entries = {name: x for name, x in config.to_dict().items() if name not in CONFIG_ENTRIES}
    return hashlib.sha256(canonical_json(entries).encode()).hexdigest()


def canonical_json(x: object) -> str:
    """JSON of a value, the same for equal sets and mappings. Other objects appear as their `str`."""

    def of_other(x: object) -> object:
        return sorted(map(str, x)) if isinstance(x, (set, frozenset)) else str(x)

    return json.dumps(x, sort_keys=True, default=of_other)


def require_readable(name: str, tensor: Tensor) -> None:
    """Raises NotImplementedError for a tensor without bytes that could be read. Runs no collective."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.is_meta or type(local) not in (Tensor, nn.Parameter):
        kind = "on the meta device" if local.is_meta else type(local).__name__
        raise NotImplementedError(f"{name} cannot be read: it is {kind}")


def tensor_digest(tensor: Tensor) -> str:
    """Hash of a readable tensor's dtype, shape and bytes.

    A parameter sharded by FSDP2 or ZeRO-3 is gathered, so every rank must call this.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if hasattr(tensor, "ds_id"):
        import deepspeed  # pyright: ignore[reportMissingImports]

        with deepspeed.zero.GatheredParameters([tensor]):
            return _digest(tensor.data)
    return _digest(tensor)


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
