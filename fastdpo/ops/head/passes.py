"""The passes of a head over all of its tiles: the forward, and the backward.

Dimensions: N scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph as _retains_graph

from ...packing import IGNORE_INDEX
from ..devices import accumulation_dtype
from .logit_rows import (
    GradientInputs,
    GradientSum,
    empty_gradients,
    split_row_scale,
    upstream_scale,
    wide_product,
)
from .results import empty_results
from .tile_format import TileFormat
from .tiles import Head, HeadCall


def empty_outputs(call: HeadCall, statistics: str, keep: int, form_jacobian: bool) -> list[Tensor]:
    """Uninitialized outputs of the forward of a head."""
    kept = TileFormat.of(call.weight, call.compute_dtype).allocate(keep, call.weight)
    return [kept, _empty_jacobian(call, form_jacobian), *empty_results(call.hidden, statistics)]


def _empty_jacobian(call: HeadCall, form_jacobian: bool) -> Tensor:
    n, d = call.hidden.shape
    return call.hidden.new_empty(n if form_jacobian else 0, d, dtype=accumulation_dtype(call.compute_dtype))


def forward_pass(call: HeadCall, statistics: str, keep: int, form_jacobian: bool) -> list[Tensor]:
    """Results of a head, and what its backward needs.

    Returns:
        Gradient tiles of the first `keep` tokens [keep, V]; the jacobian `d logp / d hidden`
        [N, D], or [0, D] if not `form_jacobian`; then the results of `Head.results`, [N] each.
    """
    with torch.autocast(call.hidden.device.type, enabled=False):
        head = Head(call)
        if not len(call.hidden):
            return empty_outputs(call, statistics, keep, form_jacobian)
        kept = head.format.allocate(keep, call.weight)
        jacobian = _empty_jacobian(call, form_jacobian)
        tile_weight = head.weight.to(kept.dtype) if form_jacobian else head.weight  # widened for float16 on a CPU
        tiles: list[list[Tensor]] = []
        for rows in head.tiles():
            gradient = None
            if rows.stop <= keep:
                gradient = kept[rows]
            elif form_jacobian:
                gradient = head.scratch(rows, kept.dtype)
            tiles.append(head.results(rows, statistics, gradient))
            if form_jacobian and gradient is not None:
                wide_product(gradient, tile_weight, jacobian[rows])
        results = tiles[0] if len(tiles) == 1 else [torch.cat(x) for x in zip(*tiles, strict=True)]
        return [kept, jacobian, *results]


def backward_pass(
    call: HeadCall,
    inputs: GradientInputs,
    kept: Tensor,
    jacobian: Tensor,
    needs: Sequence[bool],
    main_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, without elements where not needed.

    The gradient of the weight is added to `main_grad` if it is given.
    """
    grads = empty_gradients(call.hidden, call.weight, call.bias, needs)
    wide = accumulation_dtype(call.compute_dtype)
    with torch.autocast(call.hidden.device.type, enabled=False):
        ignored = call.targets == IGNORE_INDEX
        grad_logps, grad_entropy = (
            None if grad is None else grad.to(wide).masked_fill(ignored, 0)
            for grad in (inputs.grad_logps, inputs.grad_entropy)
        )
        if grad_logps is None:
            grad_logps = torch.zeros_like(inputs.total)
        inputs = inputs._replace(grad_logps=grad_logps, grad_entropy=grad_entropy)
        scale = upstream_scale(grad_logps, inputs.total, call.transform)  # [N]
        if not len(call.hidden):
            for grad in grads:
                grad.zero_()
        elif len(jacobian) and grad_entropy is None:
            torch.mul(jacobian, scale[:, None], out=grads[0])
        else:
            _visit_tiles(call, inputs, scale, kept, needs, grads, main_grad)
    return grads


def _visit_tiles(
    call: HeadCall,
    inputs: GradientInputs,
    scale: Tensor,
    kept: Tensor,
    needs: Sequence[bool],
    grads: tuple[Tensor, Tensor, Tensor],
    main_grad: Tensor | None,
) -> None:
    """Writes the gradients from those of all tiles, kept or recomputed."""
    (needs_hidden, needs_weight, needs_bias), (grad_hidden, grad_weight, grad_bias) = needs, grads
    head, dtype, wide = Head(call), kept.dtype, accumulation_dtype(call.compute_dtype)
    if inputs.grad_entropy is None:
        inputs = inputs._replace(grad_logps=None)
    else:  # scaled already, by upstream gradients that may be too small for float16
        dtype, scale = wide if dtype == torch.float16 else dtype, torch.ones_like(scale)
    row_scale, common_scale = split_row_scale(scale, dtype)
    tile_weight = head.weight.to(dtype) if needs_hidden else head.weight
    weight_sum = bias_sum = None
    if main_grad is not None:
        weight_sum = GradientSum(main_grad, wide, common_scale, accumulate=True)
    elif needs_weight:
        weight_sum = GradientSum(grad_weight, wide, common_scale)
    if needs_bias:
        bias_sum = GradientSum(grad_bias[:, None], wide, common_scale)
    for rows, tile in head.gradients(kept, inputs, dtype):
        if needs_hidden:
            place = grad_hidden[rows]
            product = place if place.dtype == wide else torch.empty_like(place, dtype=wide)
            torch.mul(wide_product(tile, tile_weight, product), scale[rows, None], out=place)
        if weight_sum is not None:
            scaled_rows = head.hidden_rows(rows).to(wide) * row_scale[rows, None]
            weight_sum.add(tile, scaled_rows.to(dtype))
        if bias_sum is not None:
            bias_sum.add(tile, row_scale[rows, None])
    for gradient_sum in (weight_sum, bias_sum):
        if gradient_sum is not None:
            gradient_sum.finish()


def take_kept(ctx: Any) -> Any:
    """Returns what the forward kept, such as gradient tiles, and frees it unless the graph is
    retained.

    Autograd does not save these tensors, so hooks on saved tensors do not move them to the host
    with the activations.
    """
    kept = ctx.kept
    if not (torch.compiler.is_compiling() or _retains_graph()):
        ctx.kept = None
    return kept
