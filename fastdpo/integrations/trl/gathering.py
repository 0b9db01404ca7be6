"""Metrics of TRL's trainers that count every rank.

TRL's trainers gather one value from each rank by `Accelerator.gather_for_metrics`. In the last batch
of an epoch whose rows do not divide evenly, accelerate mistakes these values for rows, and drops
those of the last ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ...models.identity.functions import module_of
from ..replacements import temporarily

Gather = Callable[[Tensor], Tensor]

_FUNCTIONS = ("gather", "gather_for_metrics")


def of_all_ranks(accelerator: Any, gather: Gather | None = None) -> AbstractContextManager[None]:
    """During the block, metrics are gathered from all ranks.

    Does nothing in one process, or if user code has replaced the accelerator's gathering functions.

    Args:
        accelerator: of the trainer.
        gather: gathers in the place of `Accelerator.gather`.
    """
    modules = (module_of(getattr(accelerator, name)) for name in _FUNCTIONS)
    if accelerator.num_processes == 1 or not all(x.startswith(("accelerate.", "fastdpo.")) for x in modules):
        return nullcontext()
    of_all: Gather = gather or accelerator.gather
    return temporarily(accelerator, **dict.fromkeys(_FUNCTIONS, lambda x, *args, **kwargs: of_all(x)))


def in_float32(accelerator: Any) -> AbstractContextManager[None]:
    """During the block, metrics of floats are gathered in float32, the dtype of TRL's own head.

    That of fastdpo returns float64 for a model in float64. Where TRL puts an empty tensor in the place of what a rank
    does not have, ranks would gather two dtypes, which no backend allows.
    """
    gather = accelerator.gather_for_metrics
    if accelerator.num_processes == 1:
        return nullcontext()
    return temporarily(accelerator, gather_for_metrics=lambda x: gather(x.float() if x.is_floating_point() else x))
