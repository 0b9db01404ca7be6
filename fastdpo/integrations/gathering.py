"""Metrics of a trainer that count every rank.

TRL's trainers gather one value from each rank by `Accelerator.gather_for_metrics`. In the last batch
of an epoch whose rows do not divide evenly, accelerate mistakes these values for rows, and drops
those of the last ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Gather = Callable[[Tensor], Tensor]

_FUNCTIONS = ("gather", "gather_for_metrics")


def is_replaced(accelerator: Any) -> bool:
    """Whether user code has replaced a gathering function of accelerate."""
    functions = [getattr(accelerator, name) for name in _FUNCTIONS]
    modules = [getattr(function, "__globals__", {}).get("__name__", "") for function in functions]
    return not all(module.startswith("accelerate.") for module in modules)


@contextmanager
def of_all_ranks(accelerator: Any, gather: Gather | None = None) -> Iterator[None]:
    """During the block, metrics are gathered from all ranks.

    Does nothing if user code has replaced the accelerator's gathering functions.

    Args:
        accelerator: of the trainer.
        gather: gathers in the place of `Accelerator.gather`.
    """
    if is_replaced(accelerator):
        yield
        return
    of_all: Gather = gather or (_as_it_is if accelerator.distributed_type == "NO" else accelerator.gather)
    vars(accelerator).update({name: lambda x, *args, **kwargs: of_all(x) for name in _FUNCTIONS})
    try:
        yield
    finally:
        for name in _FUNCTIONS:
            vars(accelerator).pop(name, None)


def _as_it_is(x: Tensor) -> Tensor:
    """What accelerate's `gather` returns in one process, after it has looked at its state and the environment."""
    return x


def rows_of_all_ranks(gather: Gather, rows: Tensor) -> Tensor:
    """Concatenates the values [N] of all ranks, whose N may differ, by a function that needs equal N."""
    counts = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
    padded = gather(nn.functional.pad(rows, (0, max(counts) - len(rows))))
    return torch.cat([of_rank[:n] for of_rank, n in zip(padded.chunk(len(counts)), counts, strict=True)])
