"""A fingerprint of the reference model, cheap enough to compute in every step.

Remembered log-probabilities are valid as long as it stays the same. Version counters of tensors miss writes to `.data`,
which is how callbacks update a reference, so the bits of all tensors are summed. That reads the weights once, as the
forward pass of a single token does, and takes one synchronisation.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .structure import Structure, additions_to

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FACTOR = 6364136223846793005
CPU_WORDS, WORDS = 1 << 15, 1 << 24
"""Words that are mixed at once: what a CPU's caches hold with their weights; elsewhere enough for few launches."""


class Fingerprint(NamedTuple):
    """Everything that the outputs of a model depend on.

    Attributes:
        structure: modules, their classes, hooks, replaced forwards and plain attributes; comparable within a process.
        tensors: dtype, shape and checksum of each parameter and buffer, without those of adapters that are off.
    """

    structure: int
    tensors: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]


def fingerprint(model: PreTrainedModel, structure: Structure) -> Fingerprint:
    """The fingerprint of a model as it would run now. `structure` is kept from call to call.

    Raises:
        RuntimeError, NotImplementedError: a tensor's memory can't be read.
    """
    from ..ref_logps import keys

    tensors = [*keys.active_parameters(model), *model.buffers()]
    sums = _checksums(tensors)
    described = tuple((x.dtype, tuple(x.shape), total) for x, total in zip(tensors, sums, strict=True))
    return Fingerprint(hash((structure.hash(model), *additions_to(model))), described)


@torch.no_grad()
def _checksums(tensors: list[Tensor]) -> list[int]:
    """One of each tensor. One copy to the host for each device."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        by_device[x.device].append(i)
    found = [0] * len(tensors)
    for places in by_device.values():
        sums = torch.stack([_checksum(tensors[i]) for i in places]).tolist()
        for i, total in zip(places, sums, strict=True):
            found[i] = total
    return found


def _checksum(x: Tensor) -> Tensor:
    """int64 []: the sum of the 64-bit words, each mixed and multiplied by a weight of its position, modulo 2^64."""
    flat = x.detach().reshape(-1)
    if flat.storage_offset() * flat.itemsize % 8 or flat.stride() != (1,):  # a view into a larger buffer
        flat = flat.clone(memory_format=torch.contiguous_format)
    bits = flat.view(torch.uint8)
    whole = len(bits) - len(bits) % 8
    size = CPU_WORDS if x.device.type == "cpu" else WORDS
    total = (bits[whole:].long() * _weights(8, x.device)[: len(bits) - whole]).sum()
    for words in bits[:whole].view(torch.int64).split(size):
        mixed = (words >> 29).bitwise_xor_(words)  # else a sign that flips an even number of times is lost
        total = total * FACTOR + mixed.mul_(_weights(size, x.device)[: len(words)]).sum()
    return total


@lru_cache
def _weights(n: int, device: torch.device) -> Tensor:
    """int64 [n], odd and drawn once."""
    drawn = torch.randint(-(2**62), 2**62, (n,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return (drawn * 2 + 1).to(device)
