"""Small cases on which `verdicts` compares kernels with their definitions.

Inputs and results lie in memory that is otherwise NaN: a kernel that reads outside of its inputs
returns NaN, and one that writes outside of its results leaves other values there.

Dimensions: N scored tokens, V vocabulary, D hidden size, T packed tokens, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...packing import IGNORE_INDEX
from .. import definitions
from ..attention.calls import AttentionCall, AttentionOptions
from ..head.logit_rows import Transform, upstream_scale
from ..head.results import STATISTICS, TokenLogps
from .verdicts import Comparison

MARGIN = 16  # least number of columns of NaN behind each row, which end where vectors can be loaded
TRANSFORMS = Transform(None, 1.0, 1.0), Transform(5.0, 1.7, 0.7)
TOKENS = 6
VOCABULARY = 8229  # two blocks of columns and a part of a third
ROWS = torch.tensor(
    [[0, 0, 0, 150], [0, 150, 150, 50], [0, 140, 200, 33], [60, 160, 233, 15], [248, 0, 248, 20], [268, 0, 268, 20]],
    dtype=torch.int32,
    device="cpu",
)
"""A prompt, two completions of it, a row that begins as the second one, a row without a prefix, and
a row that no other one may read from.
"""
PACKED, BEFORE_FOREIGN = 288, 268  # tokens, and those before the last row
FOREIGN = 32.0  # times random numbers: the last row in the trial of a library
WINDOW = 48


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class _Result(NamedTuple):
    """Memory for a result [n, w] of a kernel, and the NaN around it."""

    inside: Tensor
    memory: Tensor

    @staticmethod
    def like(x: Tensor, device: torch.device, dtype: torch.dtype) -> _Result:
        memory = torch.full((len(x) + 2, _columns(x.shape[1])), torch.nan, dtype=dtype, device=device)
        return _Result(memory[1:-1, : x.shape[1]], memory)

    def margin(self, name: str) -> Comparison:
        """That the memory around the result is still NaN."""
        self.inside.fill_(torch.nan)
        return Comparison(f"memory around {name}", self.memory, torch.full(self.memory.shape, torch.nan))


def _columns(width: int) -> int:
    return -(-width // MARGIN) * MARGIN + MARGIN


def _placed(x: Tensor, device: torch.device, dtype: torch.dtype, aligned: bool = True) -> Tensor:
    """A copy of x [n, ..., w] on the device, between rows and columns of NaN.

    Kernels are compiled separately for rows that start where vectors can be loaded.
    """
    n, *others, width = x.shape
    memory = torch.full((n + 2, *others, _columns(width) + (not aligned)), torch.nan, dtype=dtype, device=device)
    memory[1:-1, ..., :width] = x.to(device, dtype)
    return memory[1:-1, ..., :width]


def _targets(vocabulary: int, tokens: int = TOKENS) -> Tensor:
    targets = torch.arange(tokens) * 1579 % vocabulary
    targets[1], targets[2] = IGNORE_INDEX, vocabulary - 1
    return targets


def token_logps(device: torch.device, dtype: torch.dtype, warps: int | None = None) -> Iterator[Comparison]:
    """Forward, gradient tile and backward of `kernels/token_logps.py`."""
    from ...kernels.token_logps import NUM_WARPS, token_logps_bwd, token_logps_fwd, token_logps_tile

    warps = warps or NUM_WARPS
    vocabulary = VOCABULARY * warps // NUM_WARPS
    x = (3 * _random(TOKENS, vocabulary)).to(dtype).double().requires_grad_()
    targets, upstream = _targets(vocabulary), _random(2, TOKENS, seed=1)
    logits, on_device = _placed(x.detach(), device, dtype), targets.to(device)
    plain, capped = TRANSFORMS

    exact: Any = definitions.token_logps(x, targets)
    (slope,) = torch.autograd.grad(exact.logps.sum(), x)
    tile = _Result.like(x, device, dtype)
    logps, *sums = token_logps_fwd(logits, on_device, *plain, "", tile=tile.inside, warps=warps)
    yield Comparison("logps", logps, exact.logps)
    yield from _tile("the tile of the forward", tile, sums[2], plain, slope)
    tile = _Result.like(x, device, dtype)
    token_logps_tile(tile.inside, logits, on_device, sums, *plain)
    yield from _tile("the tile of the backward", tile, sums[2], plain, slope)

    softcap, logit_scale, temperature = capped
    options: dict[str, Any] = dict(softcap=softcap, logit_scale=logit_scale, temperature=temperature)
    exact = definitions.token_logps(x, targets, **options, outputs=STATISTICS)
    logits = _placed(x.detach(), device, dtype, aligned=False)
    logps, *found = token_logps_fwd(logits, on_device, *capped, ",".join(STATISTICS), warps=warps)
    yield Comparison("logps", logps, exact.logps)
    yield from _statistics(found[3:], exact, STATISTICS)
    of_logps, of_entropy = (g.to(device, torch.float32) for g in upstream)
    alone, both = (upstream[0] * exact.logps).sum(), (upstream * torch.stack([exact.logps, exact.entropy])).sum()
    for name, loss, given in (("logps", alone, None), ("logps and entropy", both, of_entropy)):
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        grad = _Result.like(x, device, dtype)
        token_logps_bwd(grad.inside, of_logps, given, logits, on_device, found[:3], *capped)
        yield Comparison(f"gradient of {name}", grad.inside, slope)
        yield grad.margin("the gradient")


def _tile(name: str, tile: _Result, total: Tensor, transform: Transform, slope: Tensor) -> Iterator[Comparison]:
    scale = upstream_scale(torch.ones_like(total), total, transform)
    yield Comparison(name, (tile.inside * scale[:, None]).to(tile.inside.dtype), slope)
    yield tile.margin(name)


def _statistics(found: Sequence[Tensor], exact: TokenLogps, names: Sequence[str]) -> Iterator[Comparison]:
    for name, values in zip(names, found, strict=True):
        yield Comparison(name, values.float(), getattr(exact, name))


def target_logits(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """The kernel of `kernels/linear_logps.py`."""
    from ...kernels.linear_logps import target_logits as launch

    width, vocabulary = 1100, 50
    h, w, b = _random(TOKENS, width), _random(vocabulary, width, seed=1) / width**0.5, _random(1, vocabulary, seed=2)
    h, w, b = (x.to(dtype).double() for x in (h, w, b))
    targets = torch.arange(TOKENS) * 9 % vocabulary
    placed = _placed(h, device, dtype), _placed(w, device, dtype), _placed(b, device, dtype)[0]
    for bias, transform in zip((None, placed[2]), TRANSFORMS, strict=True):
        z = torch.linalg.vecdot(h, w[targets]) + (0 if bias is None else b[0, targets])
        found = launch(*placed[:2], bias, targets.to(device), *transform)
        yield Comparison("target logits", found, transform.apply_(z))


OF_LOGITS = {"token_logps": token_logps, "target_logits": target_logits}
"""The kernels that every head runs."""


Prepare = Callable[[Tensor, Tensor, Tensor, AttentionOptions], AttentionCall]


def packed_attention(
    prepare: Prepare,
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    d_v: int,
    group: int = 2,
    windowed: bool = False,
    capped: bool = False,
    with_sinks: bool = True,
    whole_tiles: bool = False,
) -> Iterator[Comparison]:
    """Forward and backward of an attention backend, for two heads of keys with `group` of queries each.

    The last row is full of NaN, or of large numbers if the backend may multiply whole tiles, in which
    the probabilities of other rows are 0 but their values are not: 0 times NaN is NaN.
    """
    options = AttentionOptions(d**-0.5, WINDOW if windowed else None, 5.0 if capped else None)
    heads = (2 * group, d), (2, d), (2, d_v), (2 * group, d_v)
    values = [_random(PACKED, *size, seed=i).to(dtype).double() for i, size in enumerate(heads)]
    for x in values:
        x[BEFORE_FOREIGN:] *= FOREIGN if whole_tiles else torch.nan
    q, k, v, grad = (_placed(x, device, dtype) for x in values)
    query, key, value = leaves = [x[:BEFORE_FOREIGN].requires_grad_() for x in values[:3]]
    sinks = _random(2 * group, seed=4).to(dtype).double()
    for sink in (sinks, None) if with_sinks else (None,):
        exact = definitions.packed_attention(query, key, value, ROWS[:-1], **options._asdict(), sinks=sink)
        call = prepare(q, v, ROWS, options)
        out, lse = call.forward(q, k, v, None if sink is None else sink.to(device, dtype))
        yield Comparison("attention", out[:BEFORE_FOREIGN], exact)
        gradients = torch.autograd.grad(exact, leaves, values[3][:BEFORE_FOREIGN])
        found = call.backward(grad, q, k, v, out, lse)
        for name, x, slope in zip(("queries", "keys", "values"), found, gradients, strict=True):
            yield Comparison(f"gradient of {name}", x[:BEFORE_FOREIGN], slope)
