"""The metrics of TRL's DPOTrainer before its rewrite, deferred until they are logged."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..deferred_metrics import (
    codes_of,
    deferring,
    is_overridden,
    settle_where_trl_communicates,
    shown_metrics,
    stored,
)
from ..replacements import Replacements
from .ledgers import ledger_of

_COMPUTES_METRICS = (
    *("get_batch_loss_metrics", "compute_loss", "training_step", "prediction_step", "store_metrics"),
    *("store_flos", "evaluation_loop", "_stored_metrics"),
)
_METRICS = "_stored_metrics"


def replace(
    replacements: Replacements,
    DPOTrainer: Any,
    state_of: Callable[[Any], Any],
    with_reference: Callable[[Any, dict[str, Any]], dict[str, Any]],
) -> None:
    """Replaces the functions of the trainer that compute, return and store metrics.

    Args:
        replacements: those of the trainer line.
        DPOTrainer: the trainer class.
        state_of: returns a trainer's state, with `ledger` and `returns_metrics`, or None if it is
            not patched.
        with_reference: adds the reference's log-probabilities to a batch, as far as they are known.
    """
    stock_metrics = DPOTrainer.get_batch_loss_metrics
    stock_loss = DPOTrainer.compute_loss
    stock_prediction = DPOTrainer.prediction_step
    codes, callers = codes_of(stock_metrics), codes_of(stock_loss) | codes_of(stock_prediction)

    @functools.wraps(stock_metrics)
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        state = state_of(self)
        if state is None:
            return stock_metrics(self, model, batch, train_eval)
        batch = with_reference(self, batch)
        with deferring(self.accelerator, state.ledger, codes):
            loss, metrics = stock_metrics(self, model, batch, train_eval)
        read = state.returns_metrics or is_overridden(self, DPOTrainer, _COMPUTES_METRICS)
        if read or sys._getframe(1).f_code not in callers:
            return loss, state.ledger.settled(metrics)
        state.ledger.settle_if_due(read=False)
        return loss, state.ledger.keep(metrics, stored(self, _METRICS)[train_eval])

    @functools.wraps(stock_loss)
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with _returning_metrics(state_of(self), return_outputs):
            return stock_loss(self, model, inputs, return_outputs, num_items_in_batch)

    @functools.wraps(stock_prediction)
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with _returning_metrics(state_of(self), not prediction_loss_only):
            return stock_prediction(self, model, inputs, prediction_loss_only, ignore_keys)

    replacements.put(DPOTrainer, "get_batch_loss_metrics", get_batch_loss_metrics)
    replacements.put(DPOTrainer, "compute_loss", compute_loss)
    replacements.put(DPOTrainer, "prediction_step", prediction_step)
    settle_where_trl_communicates(replacements, DPOTrainer, ledger_of)
    replacements.put(DPOTrainer, _METRICS, shown_metrics(_METRICS, ledger_of, codes_of(DPOTrainer.store_metrics)))


@contextmanager
def _returning_metrics(state: Any, value: bool) -> Iterator[None]:
    """Records during the block whether the function that is running returns its metrics to its
    caller.
    """
    if state is None:  # not patched
        yield
        return
    before, state.returns_metrics = state.returns_metrics, value
    try:
        yield
    finally:
        state.returns_metrics = before
