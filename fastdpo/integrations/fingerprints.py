"""What a reference's log-probabilities rest on, cheap enough to look at in every step.

Values that are remembered stay true only while this stays the same. Versions of tensors would not do: a write to
`.data`, which is how callbacks that move a reference write, leaves them as they are. So the bits are summed: a fraction
of the reads of one forward pass, and one synchronisation.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import heads, qualify

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Fingerprint(NamedTuple):
    """Of a model as it would run now.

    Attributes:
        structure: modules, hooks and replaced forwards, attention; comparable within a process.
        tensors: dtype, shape and checksum of each parameter and buffer, without those of adapters that are off.
    """

    structure: int
    tensors: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """Raises RuntimeError or NotImplementedError where a tensor's memory can't be read."""
    from ..ref_logps import keys

    tensors = [*keys.active_parameters(model), *model.buffers()]
    sums = _checksums(tensors)
    described = tuple((x.dtype, tuple(x.shape), total) for x, total in zip(tensors, sums, strict=True))
    return Fingerprint(hash((qualify.constitution(model), *heads.additions_to(model))), described)


@torch.no_grad()
def _checksums(tensors: list[Tensor]) -> list[int]:
    """Of each tensor, the sum of its bits as words of 64, modulo 2^64. One copy to the host for each device."""
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
    """int64 []"""
    flat = x.detach().reshape(-1)
    if flat.storage_offset() * flat.itemsize % 8 or flat.stride() != (1,):  # a view into a larger buffer
        flat = flat.clone(memory_format=torch.contiguous_format)
    bits = flat.view(torch.uint8)
    whole = len(bits) - len(bits) % 8
    return bits[:whole].view(torch.int64).sum() + bits[whole:].sum(dtype=torch.int64)
