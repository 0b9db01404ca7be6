"""Cuts the layers of a backbone into segments, each with a backward pass of its own.

DistributedDataParallel begins to reduce a gradient once autograd has accumulated it. A recorded backward is one node of
autograd, behind which all gradients would be reduced at once. In segments, the reductions of one overlap the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..parts import language_model

SEGMENTS = 4
"""Number of segments. About one part in so many of the reductions is left when the backward has ended."""


Cut = tuple[list[Tensor], list[Tensor]]
"""A forward pass, whose states are cut from their graph of autograd where a segment begins: the states [1, T, D] at the
end of each segment, as a function of those at its start and of parameters, and leaves [1, T, D] with the states where
each segment but the first one begins.
"""


def first_layers(backbone: nn.Module) -> set[nn.Module]:
    """The layers with which segments begin. None unless DistributedDataParallel runs the call."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if DistributedDataParallel._get_active_ddp_module() is None:
        return set()
    layers = [x for x in language_model(cast(Any, backbone)).modules() if isinstance(x, GradientCheckpointingLayer)]
    return {layers[len(layers) * i // SEGMENTS] for i in range(1, SEGMENTS) if layers}


def segmented(
    forward: Callable[[], Tensor], layers: set[nn.Module], trained: list[Tensor]
) -> tuple[Callable[[], Cut], list[list[int]]]:
    """A forward pass in segments, and the leaves of each that its backward computes gradients of, as places in the
    starts of all segments with the trained parameters behind them. Runs both passes once.

    Args:
        forward: returns the states [1, T, D].
        layers: with which segments begin. There is one segment if autograd passes from one to another by anything else
            than the states, as where layers share keys.
        trained: the parameters that may get gradients.
    """
    run = functools.partial(_run, forward, layers)
    try:
        return run, _places(run(), trained)
    except RuntimeError:
        if not layers:
            raise
    return segmented(forward, set(), trained)


def _run(forward: Callable[[], Tensor], layers: set[nn.Module]) -> Cut:
    ends, starts = list[Tensor](), list[Tensor]()
    compiled = {layer: layer._compiled_call_impl for layer in layers}

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].requires_grad:
            ends.append(args[0])
            starts.append(args[0].detach().requires_grad_())
            args = starts[-1], *args[1:]
        return (compiled[layer] or layer._call_impl)(*args, **kwargs)

    try:
        for layer in layers:
            layer._compiled_call_impl = functools.partial(call, layer)
        ends.append(forward())
    finally:
        for layer, function in compiled.items():
            del layer._compiled_call_impl
            if function is not None:
                layer._compiled_call_impl = function
    return ends, starts


def _places(cut: Cut, trained: list[Tensor]) -> list[list[int]]:
    """The leaves that get gradients of the states at the end of each segment.

    Raises:
        RuntimeError: a segment does not depend on the one before it by the states alone. Where autograd passes through
            nodes of one twice, what they have saved is no longer there.
    """
    (ends, starts), found = cut, list[list[int]]()
    while trained and ends:
        end = ends.pop()
        gradients = torch.autograd.grad(end, [*starts, *trained], torch.zeros_like(end), allow_unused=True)
        found.insert(0, [i for i, x in enumerate(gradients) if x is not None])
    of_starts = [[i for i in places if i < len(starts)] for places in found]
    if starts and (not found[0] or of_starts != [[], *([i] for i in range(len(starts)))]):
        raise RuntimeError("a segment does not depend on the one before it by the states alone")
    return found
