"""`patch(log_savings=True)`: the logs of a trainer say which part of the padded tokens was not computed.

The numbers of all ranks are summed after `store_flos`, in which transformers' Trainer has a
collective on every rank before each log. Training logs between two of them have their difference.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from ..models import fallback
from .replacements import Replacements

METRIC = "fastdpo/tokens_saved"

_replacements: defaultdict[str, Replacements] = defaultdict(Replacements)


class _Counts:
    """The tokens of one training, given to models and computed by them, as [2] tensors.

    Attributes:
        total: of all ranks.
        logged: the total at the last log.
    """

    def __init__(self, integration: str):
        self._integration = integration
        self._before = self._current()
        self.total = self.logged = torch.zeros_like(self._before)

    def gather(self, args: Any) -> None:
        """Updates the total. Every rank must call this."""
        from transformers.training_args import ParallelMode

        total = self._current() - self._before
        if args.parallel_mode == ParallelMode.DISTRIBUTED:
            total = total.to(args.device)
            dist.all_reduce(total)
        self.total = total.cpu()

    def saved(self) -> float | None:
        """The part of the tokens since the last log that was not computed; None if there were none."""
        given, computed = (self.total - self.logged).tolist()
        self.logged = self.total
        return 1 - computed / given if given else None

    def _current(self) -> torch.Tensor:
        counts = [fallback.tokens[self._integration, name] for name in ("given", "computed")]
        return torch.tensor(counts, dtype=torch.int64, device="cpu")


def enable(integration: str, trainer: Any) -> None:
    """Makes a trainer class add the metric to its training logs."""
    attribute = f"_fastdpo_savings_{integration}"
    stock_train, stock_flos, stock_log = trainer.train, trainer.store_flos, trainer.log

    @functools.wraps(stock_train)
    def train(self, *args, **kwargs):
        vars(self)[attribute] = _Counts(integration)
        try:
            return stock_train(self, *args, **kwargs)
        finally:
            vars(self).pop(attribute, None)

    @functools.wraps(stock_flos)
    def store_flos(self):
        stock_flos(self)
        counts: _Counts | None = vars(self).get(attribute)
        if counts is not None:
            counts.gather(self.args)

    @functools.wraps(stock_log)
    def log(self, logs, *args, **kwargs):
        counts: _Counts | None = vars(self).get(attribute)
        saved = counts.saved() if counts is not None and "loss" in logs else None
        stock_log(self, logs if saved is None else {**logs, METRIC: saved}, *args, **kwargs)

    for name, function in (("train", train), ("store_flos", store_flos), ("log", log)):
        _replacements[integration].put(trainer, name, function)


def disable(integration: str) -> None:
    _replacements[integration].undo()
