"""The number of warps that work on a row of a tile: one of `ROW_WARPS`, which are timed for each head.

Dimensions: V vocabulary, D hidden size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...logs import warn
from ..choice import tuning
from ..choice.tuning import Candidate
from ..choice.verdicts import Kernel, Trial, failure_of_candidate, works
from ..devices import constant_while_tracing
from . import trials

OP = "linear_logps"
ROW_KERNEL = "token_logps"
LEAST_TUNED = 1 << 24  # elements of the weight: smaller heads take little time
DEFAULT_WARPS = "8 warps"
WHOLE_MULTIPROCESSOR = 32
"""Warps that occupy a multiprocessor of NVIDIA's at 64 registers a thread. The rows that the device works on are then
so few that most vocabularies' fit its L2 cache, from which the second pass reads them."""
ROW_WARPS: dict[str, int | None] = {DEFAULT_WARPS: None}
"""By name, the numbers of warps, one of which may be faster. None: the kernel's default."""
if torch.version.hip is None:
    ROW_WARPS[f"{WHOLE_MULTIPROCESSOR} warps"] = WHOLE_MULTIPROCESSOR


def fastest(weight: Tensor, dtype: torch.dtype, kind: str, run: Callable[[int | None], object]) -> int | None:
    """The number of warps that is fastest for a weight, or None for the default.

    Args:
        weight: [V, D].
        dtype: of the tiles.
        kind: of the transform.
        run: computes a tile with a number of warps.
    """
    device, (vocabulary, width) = weight.device, weight.shape
    if not tuning.is_on(device) or vocabulary * width < LEAST_TUNED:
        return None
    call = device, dtype, operator.index(vocabulary), operator.index(width)
    if torch.compiler.is_compiling():
        warps = _settled(*call)
    else:

        def candidates() -> list[Candidate]:
            return [
                Candidate(name, partial(run, warps), partial(failure_of_candidate, *tried(device, dtype, kind, warps)))
                for name, warps in ROW_WARPS.items()
            ]

        warps = ROW_WARPS[tuning.choose(_tuned(*call), DEFAULT_WARPS, candidates)]
    return warps if _works(device, dtype, kind, warps) else None


def others(failed: int | None, weight: Tensor, dtype: torch.dtype, reason: str) -> list[int | None]:
    """The other numbers of warps that were timed for a weight [V, D], the fastest first, after one has failed in a
    call. Warns that the first one replaces it.
    """
    call, failed_name = _tuned(weight.device, dtype, *weight.shape), _name_of(failed)
    tuning.withdraw(call, failed_name, reason)
    names = tuning.timed(call)
    if names:
        warn(f"{OP}: the kernel with {failed_name} has failed and is replaced by that with {names[0]}: {reason}")
    return [ROW_WARPS[name] for name in names]


def _name_of(warps: int | None) -> str:
    return next(name for name, x in ROW_WARPS.items() if x == warps)


@constant_while_tracing
def _settled(device: torch.device, dtype: torch.dtype, vocabulary: int, width: int) -> int | None:
    """What `fastest` chooses where nothing can be run."""
    return ROW_WARPS[tuning.settled(_tuned(device, dtype, vocabulary, width), DEFAULT_WARPS, [*ROW_WARPS])]


def _tuned(device: torch.device, dtype: torch.dtype, vocabulary: int, width: int) -> Kernel:
    return Kernel(OP, device, dtype, (f"V {vocabulary}", f"D {width}"))


def tried(device: torch.device, dtype: torch.dtype, kind: str, warps: int | None = None) -> tuple[Kernel, Trial]:
    """The kernel that works on the rows of tiles, and its trial."""
    features = (kind,) if warps is None else (kind, f"{warps} warps")
    return Kernel(ROW_KERNEL, device, dtype, features), partial(trials.rows, kind=kind, warps=warps)


@constant_while_tracing
def _works(device: torch.device, dtype: torch.dtype, kind: str, warps: int | None) -> bool:
    return works(*tried(device, dtype, kind, warps))
