"""Gradients of a model in a form that is small enough to keep: one sketch per group of parameters.

The sketch of a gradient g is a vector of SIZE sums of `s_i g_i` with random signs s, in which element
i is part of sum `(i + k) mod SIZE`. The signs and k depend on the parameter's name alone. A sketch is
linear, so the sketch of a difference is the difference of the sketches, and the expected value of
its squared norm is that of g (AMS sketch: Alon, Matias and Szegedy 1996; in buckets: Charikar, Chen
and Farach-Colton 2002). The relative standard deviation of a norm is about `1 / sqrt(2 SIZE)`, 1.1 %,
where a gradient is spread evenly over many elements.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .reward_head import CLASSIFIER_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZE = 4096
_PIECE = 512 * SIZE
"""Number of elements that are sketched at once."""

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
        total += _sketch(name, gradient.detach()).cpu()
    return {group: totals[group] for group in GROUPS if group in totals}


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


def _sketch(name: str, gradient: Tensor) -> Tensor:
    seed = zlib.crc32(name.encode())
    generator = torch.Generator(gradient.device).manual_seed(seed)
    sums = torch.zeros(SIZE, dtype=torch.float64, device=gradient.device)
    for piece in gradient.flatten().split(_PIECE):
        signs = torch.randint(2, piece.shape, generator=generator, dtype=torch.int8, device=piece.device)
        signed = torch.where(signs.bool(), piece, -piece).double()
        sums += nn.functional.pad(signed, (0, -len(signed) % SIZE)).view(-1, SIZE).sum(0)
    return sums.roll(seed % SIZE)  # so that small parameters do not share sums
