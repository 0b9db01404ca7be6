"""Gradients of a model in a form that is small enough to keep: one sketch per parameter, or per group of parameters.

The sketch of a gradient [..., D] is the sum of its rows with random signs, [D]. That of a group has SIZE sums of the
elements of its parameters' sketches with random signs, in which element i of a parameter is part of sum `(i + k) mod
SIZE`. The signs and k depend on the parameter's name alone. A sketch is linear, so the sketch of a difference is the
difference of the sketches, and the expected value of its squared norm is that of the gradient (AMS sketch: Alon, Matias
and Szegedy 1996; in buckets: Charikar, Chen and Farach-Colton 2002). The relative standard deviation of a norm is about
`1 / sqrt(2 r)` for a gradient of rank r with equal singular values.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...ops.devices import accumulation_dtype
from ..reward_head import CLASSIFIER_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZE = 4096
PIECE = 1 << 24
"""Number of elements of a gradient that are sketched at once."""

GROUPS = ("embeddings", "attention", "MLP", "norms", "head", "adapters", "others")

_ADAPTERS = re.compile(r"(^|\.)(lora_\w+|modules_to_save|trainable_tokens_\w+)\.")
_NORMS = re.compile(r"norm", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention|mamba|mixer|conv|ssm", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_forward|fc\d|moe|expert|dense_\w*h", re.IGNORECASE)


def groups_of(model: PreTrainedModel) -> dict[str, str]:
    """The group of each parameter by its name: one of GROUPS.

    A tied head is in the group of the embeddings. Mixers of hybrid models count as attention.
    """
    head = model.get_output_embeddings() or CLASSIFIER_HEAD.module_of(model)
    head_ids = set() if head is None else {id(x) for x in head.parameters()}
    groups = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            groups[full] = _group(full, module, id(parameter) in head_ids)
    return groups


def sketches(gradients: Iterable[tuple[str, Tensor]], groups: dict[str, str]) -> dict[str, Tensor]:
    """The sketches of gradients by group.

    Args:
        gradients: gradients of any shape and device with the names of their parameters.
        groups: of the parameters by name.

    Returns:
        A float64 tensor [SIZE] on the CPU for each group with a gradient.
    """
    totals: dict[str, Tensor] = {}
    for name, gradient in gradients:
        total = totals.setdefault(groups[name], torch.zeros(SIZE, dtype=torch.float64, device="cpu"))
        columns = sketch(name, gradient.detach())
        signed = columns * _signs(len(columns), f"columns of {name}")
        buckets = nn.functional.pad(signed, (0, -len(signed) % SIZE)).view(-1, SIZE).sum(0)
        total += buckets.roll(_seed(name) % SIZE)  # so that small parameters do not share sums
    return {group: totals[group] for group in GROUPS if group in totals}


def sketch(name: str, gradient: Tensor) -> Tensor:
    """The sum of a gradient's rows with random signs, which has its expected norm. A vector is its own sketch.

    Args:
        name: of the parameter.
        gradient: [..., D] of any dtype and device.

    Returns:
        [D] float32 (float64 for a float64 gradient) on the CPU.
    """
    dtype = accumulation_dtype(gradient.dtype)
    if gradient.dim() < 2:
        return gradient.to(dtype).flatten().cpu()
    rows = gradient.flatten(0, -2)
    signs = _signs(len(rows), name).to(rows.device, dtype)
    size = max(1, PIECE // max(1, rows.shape[1]))
    return torch.stack([s @ x.to(dtype) for s, x in zip(signs.split(size), rows.split(size), strict=True)]).sum(0).cpu()


def _signs(n: int, name: str) -> Tensor:
    """[n] 1.0 and -1.0, the same for each call with a name."""
    generator = torch.Generator("cpu").manual_seed(_seed(name))
    return torch.randint(2, (n,), generator=generator, device="cpu").float() * 2 - 1


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())


def _group(name: str, module: nn.Module, is_head: bool) -> str:
    if _ADAPTERS.search(name):
        return "adapters"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if is_head:
        return "head"
    if _NORMS.search(type(module).__name__):
        return "norms"
    if _ATTENTION.search(name):
        return "attention"
    return "MLP" if _MLP.search(name) else "others"
