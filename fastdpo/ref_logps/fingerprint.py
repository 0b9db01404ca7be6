"""A fingerprint of a model that is cheap enough to compute in every step.

Log-probabilities remembered from a reference model are valid as long as its fingerprint stays the
same. Callbacks update a reference by writing to `.data`, which the version counters of tensors
miss, so a checksum covers the bits of all tensors. Computing it reads the weights once, as the
forward pass of a single token does, and takes one synchronisation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, reduce
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..models.adapters import active_parameters
from ..models.sharding import local_shard
from ..models.structure import Structure, additions_to

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FACTOR = 6364136223846793005
"""Multiplier of the 64-bit linear congruential generator in Knuth's MMIX."""

CPU_WORDS, WORDS = 1 << 15, 1 << 24
"""Number of words processed at once. On a CPU, of 64 bits, they fit into its caches together with their
weights; on other devices, of 32 bits, they are many, so that kernel launches are few."""


class Fingerprint(NamedTuple):
    """Everything that the outputs of a model depend on.

    Attributes:
        structure: hash of modules, their classes, hooks, replaced forwards and plain attributes.
            Comparable within one process only.
        tensors: dtype, shape and checksum of each parameter and buffer, without inactive adapters.
    """

    structure: int
    tensors: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]


def fingerprint(model: PreTrainedModel, structure: Structure) -> Fingerprint:
    """The fingerprint of a model as it would run now.

    Args:
        model: of which this process may hold shards (see `reshard`). Then the fingerprint is that
            of the shards.
        structure: caches what it has computed for the same model, so pass the same object again.

    Raises:
        RuntimeError, NotImplementedError: the memory of a tensor cannot be read.
    """
    of_structure = hash((structure.identity(model).hash, *additions_to(model)))
    tensors = [local_shard(x) for x in _tensors(model, structure)]
    checksums = _checksums(tensors)
    described = tuple((x.dtype, tuple(x.shape), checksum) for x, checksum in zip(tensors, checksums, strict=True))
    return Fingerprint(of_structure, described)


def _tensors(model: PreTrainedModel, structure: Structure) -> list[Tensor]:
    """The parameters and buffers that the model would use now. Its structure has just been hashed."""
    if structure.modules_of(model, "adapter_layer_names"):
        return [*active_parameters(model), *model.buffers()]
    modules = structure.modules_of(model, nn.Module)
    tensors = chain.from_iterable((*module._parameters.values(), *module._buffers.values()) for module in modules)
    return [*{id(x): x for x in tensors if x is not None}.values()]


@torch.no_grad()
def _checksums(tensors: list[Tensor]) -> list[int]:
    """The checksum of each tensor. One copy to the host for each device."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        by_device[x.device].append(i)
    checksums = [0] * len(tensors)
    for indices in by_device.values():
        on_host = torch.stack([_checksum(tensors[i]) for i in indices]).tolist()
        for i, checksum in zip(indices, on_host, strict=True):
            checksums[i] = checksum
    return checksums


def _checksum(x: Tensor) -> Tensor:
    """int64 []: the sum modulo 2^64 of the words of a tensor, each multiplied by a weight of its position."""
    word, size, weighted = words_on(x.device)
    flat = x.detach().reshape(-1)
    if flat.storage_offset() * flat.itemsize % word.itemsize or flat.stride() != (1,):  # a view into a larger buffer
        flat = flat.clone(memory_format=torch.contiguous_format)
    bits, weights = flat.view(torch.uint8), _weights(size, x.device)
    whole = len(bits) - len(bits) % word.itemsize
    parts = [weighted(words, weights[: len(words)]).sum() for words in bits[:whole].view(word).split(size)]
    if whole < len(bits):
        parts.append((bits[whole:].long() * weights[: len(bits) - whole]).sum())
    return reduce(lambda total, part: total * FACTOR + part, parts)


def words_on(device: torch.device) -> tuple[torch.dtype, int, Callable[[Tensor, Tensor], Tensor]]:
    """The dtype of the words of tensors on a device, how many are processed at once, and how they are weighted."""
    return (torch.int64, CPU_WORDS, _weighted_64) if device.type == "cpu" else (torch.int32, WORDS, _weighted_32)


def _weighted_64(words: Tensor, weights: Tensor) -> Tensor:
    """Mixed before they are multiplied: otherwise, an even number of flipped signs would cancel out."""
    return (words >> 29).bitwise_xor_(words).mul_(weights)


def _weighted_32(words: Tensor, weights: Tensor) -> Tensor:
    """One kernel: on a GPU, the host needs longer to launch kernels than they take."""
    return words * weights


@lru_cache
def _weights(n: int, device: torch.device) -> Tensor:
    """int64 [n], odd and random, the same in each process."""
    drawn = torch.randint(-(2**62), 2**62, (n,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return (drawn * 2 + 1).to(device)
