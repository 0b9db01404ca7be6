"""Runs of a model's backbone on a few rows, whose hidden states and gradients can be compared."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...accuracy import floor, gradient_bound
from ...reasons import Reason
from ..parts import backbone
from ..ranks.sharding import parameters_of_run
from .comparable import is_quantized
from .gradients import sketches
from .snapshot import restored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Passing = Callable[[], AbstractContextManager[None]]

EMBEDDED = "the output of the embeddings"
ALL = "all parameters"

BUCKETS = 256
"""Number of groups of token ids for which gradients of the embeddings' output are added up."""


class Run(NamedTuple):
    """What one run of a model's backbone gives.

    Attributes:
        states: hidden states of scored positions, [M, D].
        gradients: those of a weighted sum of the states, as sketches by the names of the parameters.
        changed: names of what the modules keep that the run has changed (see `snapshot.restored`).
        dtypes: of the states and of what was differentiated by.
    """

    states: Tensor
    gradients: dict[str, Tensor]
    changed: list[str]
    dtypes: set[torch.dtype]


def run_backbone(
    model: PreTrainedModel, inputs: dict[str, Any], index: Tensor, weight: float | None, passing: Passing
) -> Run:
    """Runs the backbone of a model, and takes its states at these positions [M].

    Args:
        model: the model.
        inputs: of the backbone.
        index: int64 [M], in the flattened batch.
        weight: the sum of the states is weighted with random numbers times this. None: it is not differentiated.
        passing: makes a context for the forward pass, and one for the backward pass, which ranks that run the model
            together begin only if all of them have finished the forward pass.
    """
    with (
        restored(model) as changed,
        differentiable(model, weight is not None) as embedded,
        parameters_of_run(model) as parameters,
    ):
        with passing():
            states = backbone(model)(**inputs).last_hidden_state.flatten(0, 1).to(index.device)[index]
        if weight is None:
            return Run(states.detach(), {}, changed, {states.dtype})
        leaves = {name: x for name, x in parameters.items() if x.requires_grad and model.training}
        random = torch.randn(states.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        with passing():
            gradients, (last,) = sketches(states, (weight * random).to(states), leaves, embedded[0])
        if last is not None:  # tokens that rows share are stored once, so what equal ids get is added up
            sums = last.new_zeros(BUCKETS, last.shape[-1], dtype=torch.float32)
            sums.index_add_(0, inputs["input_ids"].flatten() % BUCKETS, last.flatten(0, -2).float())
            gradients[EMBEDDED] = sums.flatten().cpu()
        dtypes = {x.dtype for x in (states, embedded[0], *leaves.values())}
        return Run(states.detach(), gradients, changed, dtypes)


@contextmanager
def differentiable(model: PreTrainedModel, gradients: bool) -> Iterator[list[Tensor]]:
    """In the block, what the model computes can be differentiated. Yields a list that then holds the output of its
    embeddings, which needs a gradient, too.

    Without `gradients`, this is so where modules are quantized only: they may prepare for inference, for good, when
    nothing that they are given needs a gradient.
    """
    embedded: list[Tensor] = []
    if not gradients and not any(map(is_quantized, model.parameters())):
        with torch.no_grad():
            yield embedded
        return

    def keep(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        embedded.append(output if output.requires_grad else output.detach().requires_grad_())
        return embedded[-1]

    with model.get_input_embeddings().register_forward_hook(keep), torch.enable_grad():
        yield embedded


def gradient_difference(name: str, found: Run, expected: Run, rounded: Run, least: float) -> Reason | None:
    """Returns which packed gradients differ from padded ones by more than rounding explains, or None.

    Rounding explains `least` everywhere: rows add up the gradients of tokens that they share, and round in
    another order. Parameters of layers that have the same name but for numbers are judged together, by the root
    mean square of their relative errors: rounding may send single tokens to other experts.
    """
    sizes: dict[str, list[tuple[float, ...]]] = {}
    for parameter in expected.gradients.keys() | found.gradients.keys():
        ours, stock, other = (
            run.gradients.get(parameter, torch.zeros(1, device="cpu")).float() for run in (found, expected, rounded)
        )
        norms = ((ours - stock).norm().item(), (other - stock).norm().item(), max(ours.norm(), stock.norm()).item())
        sizes.setdefault(re.sub(r"\d+", "*", parameter), []).append(norms)
    if sizes:
        sizes[ALL] = [(*map(math.hypot, *itertools.chain.from_iterable(sizes.values())),)]
    for kind, norms in sizes.items():
        relative = [(error / scale, rounding / scale) for error, rounding, scale in norms if scale > 0]
        if relative:
            error, rounding = (math.hypot(*side) / math.sqrt(len(relative)) for side in zip(*relative, strict=True))
            rounding, of_parameter = max(rounding, least, floor(torch.float32)), kind not in (ALL, EMBEDDED)
            allowed = gradient_bound(rounding, of_parameter=of_parameter)
            if not error <= allowed:
                return Reason("different-gradients", model=name, parameters=kind, error=error, allowed=allowed)
    return None


def least_unit(model: PreTrainedModel, run: Run) -> float:
    """The unit of rounding of a model's least precise layers, as far as states and parameters tell.

    Rounding is an event there that a small perturbation of float32 states need not cause.
    """
    parameters = [*model.parameters()]
    dtypes = run.dtypes | {x.dtype for x in parameters if not is_quantized(x)}
    if any(map(is_quantized, parameters)):  # they are multiplied in half precision
        dtypes.add(torch.bfloat16)
    return max(torch.finfo(dtype).eps for dtype in dtypes)
