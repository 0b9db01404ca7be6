"""A head's log-probabilities whose gradient goes through some words only: the rest of the vocabulary is left out.

For each tile of tokens the columns of its gradient tile are ranked by the probability that they hold, summed over the
tokens; the first K are kept, with all of the tile's targets among them. Both products of the backward then have K
columns instead of V. Probabilities stay those over the whole vocabulary, and what each token's gradient lost is known:

    dropped_n = sum_{v left out} |d logp_n / d logit_nv|        without a softcap, the probability of those words

K is the same for every tile, so that no size depends on a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..packing import IGNORE_INDEX
from . import checks
from .head_tiles import MEMORY_BUDGET, Head, HeadCall, Tiles, empty_gradients, product, shares, take_kept
from .linear_logps import linear_logps
from .logit_rows import Transform, accumulator, cuts, row_scale, scaled_upstream
from .results import PrunedLogps
from .token_logps import empty_results, named_results

OP = "pruned_linear_logps"


def pruned_tiles(weight: Tensor, compute_dtype: torch.dtype, columns: int) -> Tiles:
    """Of so many columns, and of no more tokens, whose targets may all differ."""
    tiles = Tiles.of(weight, compute_dtype)
    return tiles._replace(rows=min(tiles.rows, columns), columns=columns)


@torch.library.custom_op("fastdpo::pruned_logps_fwd", mutates_args=())
def _fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    statistics: str,
    compute_dtype: torch.dtype,
    columns: int,
    keep: int,
    form_jacobian: bool,
) -> list[Tensor]:
    """kept columns of gradient tiles [keep, K], their words [tiles, K], jacobian [N or 0, D]; dropped, logps, shift,
    others, total, statistics; all [N].
    """
    transform = Transform(softcap, logit_scale, temperature)
    sizes = (statistics, compute_dtype, columns, keep, form_jacobian)
    kept, words, jacobian, dropped, *empty = _fwd_results(hidden, weight, *sizes)
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(OP, hidden, weight, bias, targets, compute_dtype, transform)
        parts: list[list[Tensor]] = []
        for i, rows in enumerate(cuts(len(hidden), pruned_tiles(weight, compute_dtype, columns).rows)):
            tile = head.scratch(rows, kept.dtype)
            parts.append(head.results(rows, statistics, tile))
            scale = row_scale(parts[-1][3], transform).masked_fill(head.ignored[rows], 0)
            words[i], dropped[rows] = _choose(tile, scale.abs(), head.index[rows], columns)
            part = tile[:, words[i]]
            if rows.stop <= keep:
                kept[rows] = part
            if form_jacobian:
                jacobian[rows] = product(part, head.weight[words[i]].to(part.dtype), jacobian.dtype)
        results = [torch.cat(x) for x in zip(*parts, strict=True)] if parts else empty
        return [kept, words, jacobian, dropped, *results]


def _choose(tile: Tensor, scale: Tensor, targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The words [K] to keep of a gradient tile [n, V], ascending, and how much of each token's row is left out [n]."""
    known = scale.nan_to_num(0.0)  # a target outside the vocabulary has no say in what others keep
    mass = torch.mv(tile.t(), known.to(tile.dtype)).index_fill_(0, targets, torch.inf)  # [V]
    words = mass.topk(columns, sorted=False).indices.sort().values
    left_out = torch.ones_like(mass).index_fill_(0, words, 0)
    return words, product(tile, left_out[:, None], scale.dtype)[:, 0] * scale


def _fwd_results(hidden, weight, statistics, compute_dtype, columns, keep, form_jacobian):
    tiles = pruned_tiles(weight, compute_dtype, columns)
    n, d = hidden.shape
    wide = accumulator(compute_dtype)
    return [
        hidden.new_empty(keep, columns, dtype=tiles.dtype),
        hidden.new_empty(-(-n // tiles.rows), columns, dtype=torch.long),
        hidden.new_empty(n if form_jacobian else 0, d, dtype=wide),
        hidden.new_empty(n, dtype=wide),
        *empty_results(hidden, statistics),
    ]


@_fwd.register_fake
def _(hidden, weight, bias, targets, softcap, logit_scale, temperature, *sizes):
    return _fwd_results(hidden, weight, *sizes)


@torch.library.custom_op("fastdpo::pruned_logps_bwd", mutates_args=())
def _bwd(
    grad_logps: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    kept: Tensor,
    words: Tensor,
    jacobian: Tensor,
    sums: Sequence[Tensor],
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of hidden, weight and bias; empty where not needed."""
    transform = Transform(softcap, logit_scale, temperature)
    grad_hidden, grad_weight, grad_bias = empty_gradients(hidden, weight, bias, needs)
    with torch.autocast(hidden.device.type, enabled=False):
        wide = accumulator(compute_dtype)
        of_logps = grad_logps.to(wide).masked_fill(targets == IGNORE_INDEX, 0)
        scale = scaled_upstream(of_logps, sums[-1], transform)  # [N]
        if len(jacobian):
            torch.mul(jacobian, scale[:, None], out=grad_hidden)
            return [grad_hidden, grad_weight, grad_bias]
        if not len(hidden):
            return [grad.zero_() for grad in (grad_hidden, grad_weight, grad_bias)]
        head = Head(OP, hidden, weight, bias, targets, compute_dtype, transform)
        share, largest = shares(scale, kept.dtype)
        weight_sum, bias_sum = (
            grad.zero_() if grad.dtype == wide else torch.zeros_like(grad, dtype=wide)
            for grad in (grad_weight, grad_bias)
        )
        for i, rows in enumerate(cuts(len(hidden), pruned_tiles(weight, compute_dtype, words.shape[1]).rows)):
            if rows.stop <= len(kept):
                part = kept[rows]
            else:
                part = head.gradient_again(rows, sums, None, kept.dtype)[:, words[i]]
            if needs[0]:
                of_words = head.weight[words[i]].to(part.dtype)
                torch.mul(product(part, of_words, wide), scale[rows, None], out=grad_hidden[rows])
            if needs[1]:
                h = (head.rows(rows).to(wide) * share[rows, None]).to(part.dtype)
                weight_sum.index_add_(0, words[i], product(part.t(), h, wide))
            if needs[2]:
                of_tile = product(part.t(), share[rows, None].to(part.dtype), wide)
                bias_sum.index_add_(0, words[i], of_tile[:, 0])
        for grad, total in ((grad_weight, weight_sum), (grad_bias, bias_sum)):
            grad.copy_(total if largest is None else total * largest)
        return [grad_hidden, grad_weight, grad_bias]


@_bwd.register_fake
def _(grad_logps, hidden, weight, bias, *rest):
    return empty_gradients(hidden, weight, bias, rest[-1])


class _PrunedLogps(torch.autograd.Function):
    """logps, dropped and statistics, [N] each. Only log-probabilities pass gradients on."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, statistics, compute_dtype, columns, keep, form_jacobian):
        ctx.set_materialize_grads(False)
        kept, words, jacobian, dropped, *sums_and_extra = _fwd(
            hidden, weight, bias, targets, *transform, statistics, compute_dtype, columns, keep, form_jacobian
        )
        sums, extra = sums_and_extra[:4], sums_and_extra[4:]
        ctx.kept = kept
        ctx.save_for_backward(hidden, weight, bias, targets, words, jacobian, *sums)
        ctx.transform, ctx.compute_dtype, ctx.entropy = transform, compute_dtype, "entropy" in statistics
        ctx.mark_non_differentiable(dropped, *extra[ctx.entropy :])
        return (sums[0], dropped, *extra)

    @staticmethod
    def backward(ctx, grad_logps, _, *grad_extra):
        *inputs, words, jacobian, logps, shift, others, total = ctx.saved_tensors
        kept = take_kept(ctx)
        if ctx.entropy and grad_extra[0] is not None:
            rule = "entropy must be detached: its gradient needs the whole vocabulary"
            raise NotImplementedError(f"{OP}: {rule}; use linear_logps for one")
        if grad_logps is None:
            return (None,) * 10
        needs = [bool(needed) for needed in ctx.needs_input_grad[:3]]
        sums = [logps, shift, others, total]
        grads = _bwd(grad_logps, *inputs, kept, words, jacobian, sums, *ctx.transform, ctx.compute_dtype, needs)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=True)), *[None] * 7


def pruned_linear_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    columns: int,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logps",),
    memory_budget: int = MEMORY_BUDGET,
) -> PrunedLogps:
    """`linear_logps` whose gradients go through some words of the vocabulary only: an approximation, cheaper backward.

    For models of which few words are likely anywhere. In each tile of tokens the words with the most probability pass
    gradients on, the targets among them; the backward's products shrink to as many columns, and so do the tiles that
    are kept. Results stay as they are. Meaning: `fastdpo.ops.reference.linear_logps(through=...)`.

    Extra memory: as `linear_logps`, with `columns` in place of V for the tiles that are kept.

    Args:
        hidden, weight, targets, bias, softcap, logit_scale, temperature, outputs: as in `linear_logps`.
        columns: how many words pass gradients on; tiles have at most as many tokens.
        memory_budget: bytes of kept tiles; what does not fit is computed again.

    Returns:
        `PrunedLogps`: the results, and how much of each token's gradient was left out.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
        NotImplementedError: in the backward, if a gradient reaches the entropy.
    """
    transform = {"softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    call = HeadCall.of(OP, hidden, weight, targets, bias, **transform, outputs=outputs, memory_budget=memory_budget)
    checks.require(columns >= 1, OP, "columns", "be at least 1", columns)
    if not (call.trains_head or call.forms_jacobian):
        names = tuple(filter(None, call.statistics.split(",")))
        results = linear_logps(hidden, weight, targets, bias=bias, **transform, outputs=names)
        return PrunedLogps(results, torch.zeros_like(results.logps))
    columns, keep = min(columns, len(weight)), 0
    if call.trains_head:
        keep = pruned_tiles(weight, call.compute_dtype, columns).kept(len(hidden), memory_budget)
    logps, dropped, *extra = _PrunedLogps.apply(*call.inputs, columns, keep, call.forms_jacobian)
    return PrunedLogps(named_results(logps, extra, call.statistics, targets.shape), dropped)
