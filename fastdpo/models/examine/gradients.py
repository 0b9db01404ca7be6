"""Gradients of a model in a form that is small enough to keep: a sketch of each parameter's.

The sketch of a gradient [..., D] is the sum of its rows with random signs, [D], which depend on the parameter's name
alone. It is linear, so the sketch of a difference is the difference of the sketches, and the expected value of its
squared norm is that of the gradient (AMS sketch: Alon, Matias and Szegedy 1996). The relative standard deviation of a
norm is about `1 / sqrt(2 r)` for a gradient of rank r with equal singular values.
"""

from __future__ import annotations

import functools
import re
import zlib
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...ops.devices import accumulation_dtype
from ..ranks.sharding import local_shard
from ..reward_head import CLASSIFIER_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def sketches(
    output: Tensor, upstream: Tensor, parameters: dict[str, nn.Parameter], *others: Tensor
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Sketches of the gradients of parameters, by their names, and gradients of other tensors.

    A gradient is sketched as soon as it is computed and then let go. Accumulated gradients do not change.

    Args:
        output: of any shape.
        upstream: its gradient.
        parameters: by name.
        others: further tensors, whose gradients are returned as they are, None for one that the output ignores.
    """
    found: dict[str, Tensor] = {}

    def reduce(name: str, gradient: Tensor) -> Tensor:
        found[name] = sketch(name, local_shard(gradient.detach()))
        return gradient.new_zeros(()).expand_as(gradient)

    with ExitStack() as handles:
        for name, x in parameters.items():
            handles.enter_context(x.register_hook(functools.partial(reduce, name)))
        results = torch.autograd.grad(output, [*parameters.values(), *others], upstream, allow_unused=True)
    return found, [*results[len(parameters) :]]


def by_group(sketched: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """The sketches of all trained parameters of each group with a gradient, one behind the other. A parameter without
    one has zeros.
    """
    groups, parts = groups_of(model), dict[str, list[Tensor]]()
    for name, x in model.named_parameters():
        if x.requires_grad:
            empty = torch.zeros(x.shape[-1] if x.dim() > 1 else x.numel(), device="cpu")
            parts.setdefault(groups[name], []).append(sketched.get(name, empty))
    present = {groups[name] for name in sketched}
    return {group: torch.cat(parts[group]) for group in GROUPS if group in present}


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
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(2, (len(rows),), generator=generator, device="cpu").to(rows.device, dtype) * 2 - 1
    size = max(1, PIECE // max(1, rows.shape[1]))
    return torch.stack([s @ x.to(dtype) for s, x in zip(signs.split(size), rows.split(size), strict=True)]).sum(0).cpu()


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
