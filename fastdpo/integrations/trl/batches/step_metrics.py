"""The metrics of an optimizer step of TRL's DPOTrainer that runs in several micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...bypass import STATE
from ...gathering import Gather, is_replaced, rows_of_all_ranks
from ...replacements import temporarily


class StepMetrics:
    """Makes the metrics of the micro-batches of a step those of one batch.

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
