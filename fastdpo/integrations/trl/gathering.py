"""Metrics of TRL's trainers that count every rank, and every micro-batch of a step.

TRL's trainers gather one value from each rank by `Accelerator.gather_for_metrics`. In the last batch
of an epoch whose rows do not divide evenly, accelerate mistakes these values for rows, and drops
those of the last ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..bypass import STATE
from ..replacements import temporarily

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
    of_all: Gather = gather or accelerator.gather
    with temporarily(accelerator, **dict.fromkeys(_FUNCTIONS, lambda x, *args, **kwargs: of_all(x))):
        yield


def in_float32(accelerator: Any) -> AbstractContextManager[None]:
    """During the block, metrics of floats are gathered in float32, the dtype of TRL's own head.

    That of fastdpo returns float64 for a model in float64. Where TRL puts an empty tensor in the place of what a rank
    does not have, ranks would gather two dtypes, which no backend allows.
    """
    gather = accelerator.gather_for_metrics
    if accelerator.num_processes == 1:
        return nullcontext()
    return temporarily(accelerator, gather_for_metrics=lambda x: gather(x.float() if x.is_floating_point() else x))


def rows_of_all_ranks(gather: Gather, rows: Tensor) -> Tensor:
    """Concatenates the values [N] of all ranks, whose N may differ, by a function that needs equal N."""
    counts = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
    padded = gather(nn.functional.pad(rows, (0, max(counts) - len(rows))))
    return torch.cat([of_rank[:n] for of_rank, n in zip(padded.chunk(len(counts)), counts, strict=True)])


class StepMetrics:
    """Makes the metrics of the micro-batches of a step those of one batch, for DPOTrainer and RewardTrainer.

    In each micro-batch, TRL gathers the values of the whole step so far, and the metrics that it
    computes from them replace those of the micro-batch before. The last micro-batch of a step
    gathers them from all ranks, the others only from their own.
    """

    def __init__(self) -> None:
        self.start_step()

    def start_step(self) -> None:
        self._values: list[list[Tensor]] = []  # what each gather of a micro-batch was given in this step
        self._added: dict[str, slice] = {}  # the metrics that the micro-batch before has added
        self._added_tokens = 0

    @contextmanager
    def micro_batch(self, trainer: Any, ends_step: bool) -> Iterator[None]:
        """Runs a micro-batch. Each rank must run the same number of them in a step."""
        if is_replaced(trainer.accelerator):
            yield
            return
        self._remove_metrics(trainer)
        lengths = {name: len(values) for name, values in trainer._metrics["train"].items()}
        tokens = trainer._total_train_tokens
        has_all_ranks = ends_step and trainer.accelerator.num_processes > 1
        gather = self._gather_of_step(trainer.accelerator.gather if has_all_ranks else None)
        with temporarily(vars(trainer)[STATE], gather=gather):
            yield
        after = trainer._metrics["train"].items()
        self._added = {name: slice(lengths.get(name, 0), len(values)) for name, values in after}
        self._added_tokens = trainer._total_train_tokens - tokens
        if ends_step:
            self.start_step()

    def _remove_metrics(self, trainer: Any) -> None:
        """Removes the metrics of the micro-batch before, unless a log has consumed them."""
        metrics = trainer._metrics["train"]
        for name, added in self._added.items():
            if isinstance(metrics.get(name), list):
                del metrics[name][added]
        trainer._total_train_tokens -= self._added_tokens

    def _gather_of_step(self, of_ranks: Gather | None) -> Gather:
        """Gathers the values of this step, by a function that gathers from all ranks, or from this rank alone."""
        position = itertools.count()

        def gather(x: Tensor) -> Tensor:
            i = next(position)
            if i == len(self._values):
                self._values.append([])
            self._values[i].append(x.detach().reshape(-1))
            rows = torch.cat(self._values[i])
            return rows if of_ranks is None else rows_of_all_ranks(of_ranks, rows)

        return gather
