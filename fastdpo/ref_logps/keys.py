"""The key under which reference log-probabilities are stored: a hash of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..models.adapters import active_adapters
from ..models.parts import base_of
from ..models.ranks.sharding import is_sharded
from ..reasons import Reason
from . import ranks
from .digests import canonical_json, config_digest, require_readable, tensor_digest
from .module_state import ModuleStates, require_no_additions
from .shards import Shards

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from .pairs import Pairs

Bounds = tuple[int, int | None]
"""The packed tokens and the pairs, or None for any number of them, of the largest batch in one call of the model.
A pair of more tokens is a batch of its own.
"""

VERSION = "fastdpo.ref_logps/6"
"""Version of the computed values and of the files that store them. Increase it with every change of them."""


def shards_of(
    directory: Path | None, model: nn.Module, pairs: Pairs, precision: str, ld_alpha: float | None, bounds: Bounds
) -> Shards | None:
    """The files with the values of these pairs under a model, as it would run now, in this precision.

    Every rank must call this, with the same arguments.

    Returns:
        The files. None without a directory, or, with one logged reason, if the values cannot be cached.

    Raises:
        ValueError: ranks were given other arguments.
    """
    options = (pairs.max_length, pairs.truncation_mode, ld_alpha, bounds)
    ranks.require_equal_work(pairs.digest, *options, directory is None)
    if directory is None or ranks.cache_disabled(uncacheable_reason(model)):
        return None
    found = key(pairs, model_digest(base_of(model, "precompute")), precision, ld_alpha)
    ranks.require_equal_work(found)
    return Shards(directory / found, found, len(pairs))


def key(pairs: Pairs, model: str, precision: str, ld_alpha: float | None) -> str:
    """The key of the log-probabilities of these pairs under a model with
    this digest, run in this precision.
    """
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


def model_digest(model: PreTrainedModel) -> str:
    """Hash of a model as it would run now: its configuration, `ModuleStates` and active adapters.

    A model with disabled adapters has the digest of the model without them. Parameters sharded by
    FSDP2 or ZeRO-3 are gathered one at a time, so every rank must call this, and only if no rank has an
    `uncacheable_reason`. The digest does not depend on the number of ranks.
    """
    sharded = is_sharded(model)
    states = ModuleStates(model)
    tensors = sorted(states.tensors.items())
    different = {id(x): x for _, x in tensors}
    with ThreadPoolExecutor(1 if sharded else min(8, os.cpu_count() or 1)) as pool:
        digests = (map if sharded else pool.map)(tensor_digest, different.values())
        of_id = dict(zip(different, digests, strict=True))
    of_tensors = [[name, of_id[id(x)]] for name, x in tensors]
    entries = sorted(map(canonical_json, states.entries))
    whole = [config_digest(model.config), of_tensors, entries, active_adapters(model)]
    return hashlib.sha256(canonical_json(whole).encode()).hexdigest()


def uncacheable_reason(model: nn.Module) -> Reason | None:
    """Returns why values of a model cannot be cached, or None if they can. Runs no collective.

    Args:
        model: a transformers model, which PEFT, DDP or FSDP2 may have wrapped. Hooks of the
            wrappers count, too.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return Reason("fsdp1")
    base = base_of(model, "precompute")
    inside = set(base.modules())
    try:
        for name, x in ModuleStates(base).tensors.items():
            require_readable(name, x)
        for name, module in model.named_modules():
            if module not in inside:  # a wrapper of the model
                require_no_additions(name or "the model", module)
    except NotImplementedError as error:
        return Reason("no-key", error=error)
    return None
