"""Heads whose vocabulary transformers' tensor parallelism cuts over ranks.

A plan of `colwise_gather_output` or `colwise_rep` makes the weight and the bias DTensors with
consecutive rows on each rank, and replaces the head's forward by one that gathers the logits. FSDP2
may shard these rows again over other ranks. It gathers them before the head is called.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types

from ..ops import VocabularyGroup
from .functions import closure_contents, inner_function, module_of, name_of

_StridedShard = getattr(placement_types, "_StridedShard", Replicate)
"""The placement by FSDP2 of a tensor that is a shard already. It has no public name."""

FORWARD = "TensorParallelLayer.install_forward.<locals>.tp_forward"


def gathers_logits(forward: object) -> bool:
    """Whether a head's forward is `nn.Linear`'s on a part of the vocabulary, after which the logits
    of all ranks are gathered.
    """
    if not callable(forward) or name_of(forward) != FORWARD or not module_of(forward).startswith("transformers."):
        return False
    function: Any = inner_function(forward)
    variables = dict(zip(function.__code__.co_freevars, closure_contents(function), strict=True))
    style, inner = variables.get("self"), inner_function(variables.get("original_forward"))
    layouts = [getattr(style, name, None) for name in ("input_layouts", "output_layouts")]
    return inner is nn.Linear.forward and type(style).__name__ == "ColwiseParallel" and layouts == [Replicate()] * 2


def is_cut(head: nn.Linear) -> bool:
    """Whether every rank has some rows of the weight and, if there is one, the same of the bias.

    The result is the same on all ranks.
    """
    weight, bias = head._parameters["weight"], head._parameters.get("bias")
    return all(x is None or _is_cut(x) for x in (weight, bias)) and min(_sizes(cast(DTensor, weight))) > 0


def local_parameters(head: nn.Linear) -> tuple[Tensor, Tensor | None, VocabularyGroup | None]:
    """The weight and the bias of this rank, and the ranks that the vocabulary is cut over, if it is.

    Gradients reach the head's own parameters.
    """
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return weight, bias, None
    group = VocabularyGroup.of_sizes(_sizes(weight), weight.device_mesh.get_group())
    return weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else None, group


def _is_cut(x: Tensor) -> bool:
    if not isinstance(x, DTensor):
        return False
    *of_fsdp, placement = x.placements
    is_cut = type(placement) is Shard and placement.dim == 0
    return is_cut and all(isinstance(other, _StridedShard | Replicate) for other in of_fsdp)


def _sizes(weight: DTensor) -> list[int]:
    mesh = weight.device_mesh
    return chunk_sizes(len(weight), mesh.size(mesh.ndim - 1))


def chunk_sizes(rows: int, ranks: int) -> list[int]:
    """The rows of each rank, as `Shard(0)` cuts them."""
    chunk = -(-rows // ranks)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(ranks)]
