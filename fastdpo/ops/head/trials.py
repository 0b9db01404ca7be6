"""Small cases on which `verdicts` compares the kernels of logits with their definitions.

Dimensions: N scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...packing import IGNORE_INDEX
from ..choice.poisoned_memory import Result, placed, random_values
from ..choice.verdicts import Comparison
from . import definitions
from .logit_rows import upstream_scale
from .results import LOGGED_STATISTICS, STATISTICS, TokenLogps, Transform

TRANSFORMS = {
    "plain": Transform(None, 1.0, 1.0),
    "scaled": Transform(None, 1.7, 0.7),
    "capped": Transform(5.0, 1.7, 0.7),
}
"""By `Transform.kind`."""
TOKENS = 6
VOCABULARY = 8240  # two blocks of columns and a part of a third; divisible by 16, as most vocabularies are
UNALIGNED = VOCABULARY - 11


def _targets(vocabulary: int) -> Tensor:
    targets = torch.arange(TOKENS) * 1579 % vocabulary
    targets[1], targets[2] = IGNORE_INDEX, vocabulary - 1
    return targets


def rows(
    device: torch.device, dtype: torch.dtype, kind: str = "plain", warps: int | None = None
) -> Iterator[Comparison]:
    """Forward and gradient tile of `kernels/token_logps.py` as heads call them. Training compiles nothing else."""
    from ...kernels.token_logps import NUM_WARPS, token_logps_bwd, token_logps_fwd

    blocks, transform = 1 if warps is None else warps // NUM_WARPS, TRANSFORMS[kind]
    x, targets = _logits(VOCABULARY * blocks, dtype), _targets(VOCABULARY * blocks)
    logits, on_device = placed(x.detach(), device, dtype), targets.to(device)
    exact: Any = definitions.token_logps(x, targets, **transform._asdict(), outputs=LOGGED_STATISTICS)
    (slope,) = torch.autograd.grad(exact.logps.sum(), x)
    own = transform.apply_(x.detach().gather(1, targets.clamp(min=0)[:, None])[:, 0]).to(device, torch.float32)
    tile = Result.like(x, device, dtype)
    statistics = ",".join(LOGGED_STATISTICS)
    logps, *found = token_logps_fwd(logits, on_device, *transform, statistics, own, tile=tile.inside, warps=warps)
    yield "logps", logps, exact.logps
    yield from _statistics(found[3:], exact, LOGGED_STATISTICS)
    yield from _tile("the tile of the forward", tile, found[2], transform, slope)
    tile = Result.like(x, device, dtype)
    token_logps_bwd(tile.inside, None, None, logits, on_device, found[:3], *transform)
    yield from _tile("the tile of the backward", tile, found[2], transform, slope)


def token_logps(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Forward and backward of `kernels/token_logps.py` for given logits that are not aligned, with every option."""
    from ...kernels.token_logps import token_logps_bwd, token_logps_fwd

    x, targets, capped = _logits(UNALIGNED, dtype), _targets(UNALIGNED), TRANSFORMS["capped"]
    upstream, on_device = random_values(2, TOKENS, seed=1), targets.to(device)
    exact: Any = definitions.token_logps(x, targets, **capped._asdict(), outputs=STATISTICS)
    logits = placed(x.detach(), device, dtype, aligned=False)
    logps, *found = token_logps_fwd(logits, on_device, *capped, ",".join(STATISTICS))
    yield "logps", logps, exact.logps
    yield from _statistics(found[3:], exact, STATISTICS)
    of_logps, of_entropy = (g.to(device, torch.float32) for g in upstream)
    alone, both = (upstream[0] * exact.logps).sum(), (upstream * torch.stack([exact.logps, exact.entropy])).sum()
    for name, loss, given in (("logps", alone, None), ("logps and entropy", both, of_entropy)):
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        grad = Result.like(x, device, dtype)
        token_logps_bwd(grad.inside, of_logps, given, logits, on_device, found[:3], *capped)
        yield f"gradient of {name}", grad.inside, slope
        yield grad.margin("the gradient")


def _logits(vocabulary: int, dtype: torch.dtype) -> Tensor:
    return (3 * random_values(TOKENS, vocabulary)).to(dtype).double().requires_grad_()


def _tile(name: str, tile: Result, total: Tensor, transform: Transform, slope: Tensor) -> Iterator[Comparison]:
    scale = upstream_scale(torch.ones_like(total), total, transform)
    yield name, (tile.inside * scale[:, None]).to(tile.inside.dtype), slope
    yield tile.margin(name)


def _statistics(found: Sequence[Tensor], exact: TokenLogps, names: Sequence[str]) -> Iterator[Comparison]:
    for name, values in zip(names, found, strict=True):
        yield name, values.float(), getattr(exact, name)


def target_logits(
    device: torch.device, dtype: torch.dtype, kind: str = "plain", biased: bool = False
) -> Iterator[Comparison]:
    """The kernel of `kernels/linear_logps.py`."""
    from ...kernels.linear_logps import target_logits as launch

    width, vocabulary = 1104, 48  # divisible by 16, as those of models are
    shapes = (TOKENS, width), (vocabulary, width), (1, vocabulary)
    h, w, b = (random_values(*shape, seed=i) for i, shape in enumerate(shapes))
    h, w, b = (x.to(dtype).double() for x in (h, w / width**0.5, b))
    targets = torch.arange(TOKENS) * 9 % vocabulary
    hidden, weight, biases = (placed(x, device, dtype) for x in (h, w, b))
    z, transform = torch.linalg.vecdot(h, w[targets]) + (b[0, targets] if biased else 0), TRANSFORMS[kind]
    found = launch(hidden, weight, biases[0] if biased else None, targets.to(device), *transform)
    yield "target logits", found, transform.apply_(z)


OF_LOGITS = {"token_logps": token_logps, "linear_logps": rows, "target_logits": target_logits}
"""What computes given logits, and the two kernels of a head without a transform and a bias."""
