"""`patch(max_tokens=...)` for trainers that keep the rows of a step on their rank: they are cut by a budget of tokens.

The batches that a step accumulates are collected. Their rows are cut anew, with those that begin alike together, and
each micro-batch gets the weight in the step that its rows have in TRL. What TRL logs are numbers of its own batches:
its own code computes them, from what the model has returned for their rows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from torch import Tensor, nn

from ....batching.rows import RowPlanner
from ....logs import warn
from ....models.batch import as_current
from ....models.calls import outcomes
from ....models.parts import base_of
from ....packing import IGNORE_INDEX
from ...collating import with_layout
from ...replacements import Replacements, callback, temporarily
from ...scored_rows import merged
from ..fused_head import FusedHeadLine
from ..gathering import of_all_ranks
from .learned_tokens import LearnedTokens, learning
from .loaders import require_supported
from .token_budget import (
    STEPS,
    own_loss_reason,
    shares_prompts,
    unsupported_processes_reason,
    width_reason,
    without_sync,
)

Batch = dict[str, Any]

_PADDING = {"attention_mask": 0, "completion_mask": 0, "labels": IGNORE_INDEX}
"""The values of entries of a batch behind the last token of a row that is real or has a label. A collator may leave
tokens with labels out of its attention mask, such as the end of a row whose id is that of padding.
"""

Scores = dict[str, Tensor]
"""What a model has returned for rows that TRL's loss reads, by name, [R, W] each."""


class RowBudgetLine(FusedHeadLine):
    """The line of a trainer whose steps are cut.

    Attributes:
        replaced_with_budget: functions of the class that are replaced with `max_tokens` only.
    """

    relies_on: ClassVar[Mapping[str, tuple[str, ...]]] = {**FusedHeadLine.relies_on, "max_tokens": STEPS}
    replaced_with_budget: ClassVar[tuple[str, ...]] = ("training_step", "train", "evaluate", "_maybe_log_save_evaluate")

    # What a trainer defines.

    def uncuttable(self, trainer: Any) -> str | None:
        """What of a trainer keeps its rows from weighing the same in any micro-batch, or None."""

    def must_train(self, trainer: Any) -> bool:
        """Whether the rows that were taken cannot wait for the end of the step."""
        return False

    def joined(self, trainer: Any, batches: list[Batch]) -> Batch:
        """The rows of some batches in one."""
        raise NotImplementedError

    def tokens(self, joined: Batch) -> list[NDArray[np.int64]]:
        """The tokens of each row."""
        raise NotImplementedError

    def width(self, batch: Batch) -> int:
        """That of the scores of a batch."""
        raise NotImplementedError

    def score_without_gradients(
        self, trainer: Any, model: nn.Module, batches: list[Batch], joined: Batch, micro_batches: list[Tensor]
    ) -> None:
        """Adds to the batches and to their joined rows what must be known of all rows before one is trained on."""

    def micro_batch(self, trainer: Any, joined: Batch, rows: Tensor) -> Batch:
        """The batch that is trained on for some of the joined rows."""
        raise NotImplementedError

    def weighing(
        self, trainer: Any, batches: list[Batch], joined: Batch, rows: Tensor
    ) -> AbstractContextManager[object]:
        """A context in which the loss of a micro-batch is the part that its rows have in the loss of the step."""
        return nullcontext()

    def computing_metrics(self, trainer: Any) -> AbstractContextManager[object]:
        """A context in which TRL's loss computes the metrics of a batch whose scores are known."""
        return nullcontext()

    # What all of them do.

    def replace(self) -> None:
        super().replace()
        if self.options.max_tokens is not None:
            for name in self.replaced_with_budget:
                self.wrap(name, getattr(self, name))

    def init(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().init(stock, trainer, *args, **kwargs)
        state = self.state_of(trainer)
        if state is not None and self.options.max_tokens is not None:
            self._require_cuttable(trainer)
            state.budget = RowBudget(self, trainer)
            trainer.add_callback(callback(on_step_begin=state.budget.start_step))

    def disable(self) -> None:
        budgets = [(trainer, self.budget_of(trainer)) for trainer in self.trainers()]
        super().disable()
        for trainer, budget in budgets:
            if budget is not None:
                budget.hand_back(trainer)

    def budget_of(self, trainer: Any) -> RowBudget | None:
        """What cuts the steps of a trainer, or None."""
        return getattr(self.state_of(trainer), "budget", None)

    def training_step(
        self, stock: Callable, trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        budget = self.budget_of(trainer)
        if budget is None:
            return stock(trainer, model, inputs, *args, **kwargs)
        return budget.training_step(trainer, model, inputs, lambda batch: stock(trainer, model, batch, *args, **kwargs))

    def evaluate(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluates with the metrics of all batches that were taken, as TRL does."""
        budget = self.budget_of(trainer)
        if budget is not None:
            budget.catch_up(trainer)
        return stock(trainer, *args, **kwargs)

    train = evaluate  # again, after an exception within a step

    def _maybe_log_save_evaluate(
        self, stock: Callable, trainer: Any, tr_loss: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """At the end of an epoch, a step may have been stopped."""
        budget = self.budget_of(trainer)
        if budget is not None:
            budget.catch_up(trainer)
            tr_loss += budget.loss_since(trainer)
        stock(trainer, tr_loss, *args, **kwargs)

    def _require_cuttable(self, trainer: Any) -> None:
        """Raises NotImplementedError if the steps of a trainer cannot be cut."""
        require_supported("max_tokens", unsupported_processes_reason(trainer))
        require_supported("max_tokens", own_loss_reason(trainer, self.trainer_class()))
        if trainer.aux_loss_enabled:
            require_supported("max_tokens", "the auxiliary loss of routers, which is not a mean over rows")
        require_supported("max_tokens", self.uncuttable(trainer))


class PaddedRowBudgetLine(RowBudgetLine):
    """The line of a trainer whose batches have `input_ids` and `attention_mask`, [R, L] each, as a collator has padded
    them.

    The host reads these batches once, and packs the micro-batches from there while the device computes.

    Attributes:
        entries: that a batch may have. Those of a name with a prefix have the width of the mask with this prefix.
        fields: of the output of the model, that TRL's loss reads.
    """

    entries: ClassVar[frozenset[str]]
    fields: ClassVar[tuple[str, ...]]

    def joined(self, trainer: Any, batches: list[Batch]) -> Batch:
        unknown = next((name for batch in batches for name in batch if name not in self.entries), None)
        require_supported("max_tokens", unknown and f"batches with {unknown}")
        joined = merged(*({name: x.cpu() for name, x in batch.items()} for batch in batches))
        is_empty = any(not x.any(1).all() for name, x in joined.items() if name.endswith("attention_mask"))
        require_supported("max_tokens", "rows whose attention mask is 0" if is_empty else None)
        width = joined["input_ids"].shape[1]  # of which micro-batches may have less
        require_supported("max_tokens", width_reason(base_of(trainer.model, "max_tokens"), width))
        return joined

    def tokens(self, joined: Batch) -> list[NDArray[np.int64]]:
        ids, real = (joined[name].numpy() for name in ("input_ids", "attention_mask"))
        return [row[mask != 0] for row, mask in zip(ids, real, strict=True)]

    def width(self, batch: Batch) -> int:
        return batch["input_ids"].shape[1] - 1

    def micro_batch(self, trainer: Any, joined: Batch, rows: Tensor) -> Batch:
        groups = "content" if self.options.share_prompts else None
        batch = with_layout(self.picked(joined, rows), groups, rounded=self.options.graphs)
        return on_device(batch, trainer.accelerator.device)

    def picked(self, joined: Batch, rows: Tensor) -> Batch:
        """Some of the joined rows, in a batch that is as narrow as they are."""
        batch = {name: x[rows] for name, x in joined.items()}
        for prefix in ("", "KL_"):
            names = [name for name, x in batch.items() if x.ndim > 1 and name.startswith("KL_") == bool(prefix)]
            needed = [batch[f"{prefix}{name}"] != x for name, x in _PADDING.items() if f"{prefix}{name}" in names]
            if needed:
                width = int(torch.stack(needed).any(0).any(0).nonzero().max()) + 1
                batch |= {name: batch[name][:, :width] for name in names}
        return batch

    def scoring(self, trainer: Any, model: Any) -> Any:
        """The model that TRL's loss calls: one that notes or knows its scores while a step is cut."""
        budget = self.budget_of(trainer)
        if budget is None or not budget.is_running:
            return model

        def call(**inputs: Any) -> Any:
            columns = slice(1 - inputs["input_ids"].shape[1], None)  # without virtual tokens of an adapter
            return budget.scores(
                lambda: model(**inputs),
                lambda output: {name: getattr(output, name)[:, columns] for name in self.fields},
                lambda known: SimpleNamespace(**known),
            )

        return call


class RowBudget:
    """Cuts the steps of one trainer of a line."""

    def __init__(self, line: RowBudgetLine, trainer: Any):
        is_learned = line.options.max_tokens == "auto"
        self._learned = LearnedTokens(trainer, line.name) if is_learned else None
        self._line, self._max_tokens = line, 0 if is_learned else cast(int, line.options.max_tokens)
        self._batches: list[Batch] = []  # of the step, not trained on yet
        self._position = 0  # in the step, of the next batch
        self._scored: list[Scores] | None = None  # by the micro-batches that were trained on, if any are
        self._known: Scores | None = None  # of the batch whose metrics are computed, if any are
        self._loss: Tensor | None = None  # of the rows that were trained on, if it was not returned yet
        self._model: nn.Module  # the policy, in the wrappers of engines
        self._train_on: Callable[[Batch], Tensor]
        self._handed_back = Replacements()
        self._warned = False

    def start_step(self, *args: Any, **kwargs: Any) -> None:
        """Begins a step. A training that was stopped within one may have left its position."""
        self._batches, self._position, self._loss = [], 0, None
        self._handed_back.undo()

    def training_step(self, trainer: Any, model: nn.Module, inputs: Any, train_on: Callable[[Batch], Tensor]) -> Tensor:
        """Takes a batch of a step. The last one of the step trains on all that were taken.

        Args:
            trainer: the trainer.
            model: the policy.
            inputs: what the trainer prepares the batch from.
            train_on: the trainer's own step for a batch, which returns its loss.

        Returns:
            The loss of all rows that were trained on since the last batch, a scalar.
        """
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        self._model, self._train_on = model, train_on
        self._batches.append(trainer._prepare_inputs(inputs))
        self._position += 1
        ends_step = self._position == trainer.current_gradient_accumulation_steps
        if ends_step or self._line.must_train(trainer):
            self._train_on_batches(trainer, ends_step)
        return self.loss_since(trainer)

    def catch_up(self, trainer: Any) -> None:
        """Trains on the batches that wait for the end of their step."""
        if self._batches:
            self._train_on_batches(trainer, ends_step=False)

    def loss_since(self, trainer: Any) -> Tensor:
        """The loss of all rows that were trained on since the last call, a scalar."""
        loss, self._loss = self._loss, None
        return torch.zeros((), device=trainer.args.device) if loss is None else loss

    def _train_on_batches(self, trainer: Any, ends_step: bool) -> None:
        batches, self._batches = self._batches, []
        self._position *= not ends_step
        joined = self._line.joined(trainer, batches)
        micro_batches = self._cut(trainer, batches, joined)
        outcomes[self._line.name, "steps"] += ends_step
        outcomes[self._line.name, "micro-batches"] += len(micro_batches)
        with _taking_prepared(trainer):
            self._line.score_without_gradients(trainer, self._model, batches, joined, micro_batches)
            self._scored = []
            try:
                loss = self._train(trainer, self._model, batches, joined, micro_batches, ends_step)
                self._log_metrics(trainer, self._model, batches, torch.cat(micro_batches))
            finally:
                self._scored = None
        self._loss = loss if self._loss is None else self._loss + loss

    def hand_back(self, trainer: Any) -> None:
        """Has the trainer's own steps train on the batches that were taken, when the next one comes."""

        def training_step(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            self._handed_back.undo()
            batches, self._batches = self._batches, []
            loss = self.loss_since(trainer)
            for batch in batches:
                with _taking_prepared(trainer), without_sync(trainer, model):
                    loss = loss + self._train_on(batch)
            return loss + trainer.training_step(model, *args, **kwargs)

        if trainer.is_in_train:
            self._handed_back.put(trainer, "training_step", training_step)

    @property
    def is_running(self) -> bool:
        """Whether rows of a step are trained on, or their metrics computed."""
        return self._scored is not None

    def scores(
        self, score: Callable[[], Any], read: Callable[[Any], Scores], returned_for: Callable[[Scores], Any]
    ) -> Any:
        """What a model returns for a batch: what is known, if its metrics are computed.

        Args:
            score: calls the model.
            read: of what it returns, the scores.
            returned_for: what it returns for scores.
        """
        if self._known is not None:
            return returned_for(self._known)
        returned = score()
        if self._scored is not None:
            self._scored.append({name: x.detach() for name, x in read(returned).items()})
        return returned

    def _cut(self, trainer: Any, batches: list[Batch], joined: Batch) -> list[Tensor]:
        """The rows of each micro-batch, by their numbers in the joined batches."""
        share = shares_prompts(self._line.options.share_prompts, trainer.model)
        rows = self._line.tokens(joined)
        planner, max_tokens = RowPlanner(rows, share=share), self._max_tokens
        if self._learned is not None:
            ends = itertools.accumulate(map(_size, batches), initial=0)
            of_batches = (rows[start:end] for start, end in itertools.pairwise(ends))
            own = max(RowPlanner(x, share=share).tokens(0, len(x)) for x in of_batches)
            max_tokens = self._learned.of_step(self._learned.step, own)
        runs = planner.cut(max_tokens)
        largest = max(planner.tokens(*run) for run in runs)
        if largest > max_tokens and self._learned is None and not self._warned:
            self._warned = True
            tokens = f"{largest} tokens, more than max_tokens={max_tokens}"
            warn(f"{self._line.name}: a row has {tokens}, and runs alone")
        if trainer.accelerator.num_processes > 1:  # each must run the model as often
            counts = trainer.accelerator.gather(torch.tensor([len(runs)], device=trainer.accelerator.device))
            runs = planner.divided(runs, int(counts.max()))
        if self._learned is not None:
            self._learned.ran(max(planner.tokens(*run) for run in runs))
        return [torch.tensor(planner.rows(run), device="cpu") for run in runs]

    def _train(
        self,
        trainer: Any,
        model: nn.Module,
        batches: list[Batch],
        joined: Batch,
        micro_batches: list[Tensor],
        ends_step: bool,
    ) -> Tensor:
        loss = torch.zeros((), device=trainer.args.device)
        for i, rows in enumerate(micro_batches):
            is_last = ends_step and i == len(micro_batches) - 1
            with (
                learning(self._learned) if is_last else without_sync(trainer, model),
                self._line.weighing(trainer, batches, joined, rows),
                _without_metrics(trainer),
            ):
                loss = loss + self._train_on(self._line.micro_batch(trainer, joined, rows))
        return loss

    def _log_metrics(self, trainer: Any, model: nn.Module, batches: list[Batch], rows: Tensor) -> None:
        """Has TRL compute the metrics of its own batches, from the scores of the rows that were trained on."""
        places, sizes = rows.argsort(), [_size(batch) for batch in batches]
        scored = {name: x[places].split(sizes) for name, x in merged(*self._scored or ()).items()}
        for i, batch in enumerate(batches):
            width = self._line.width(batch)
            known = {name: F.pad(x[i], (0, width - x[i].shape[1])) for name, x in scored.items()}  # or cut there
            with (
                temporarily(self, _known=known),
                self._line.computing_metrics(trainer),
                torch.no_grad(),
                trainer.compute_loss_context_manager(),
            ):
                trainer.compute_loss(model, batch)


def on_device(batch: Batch, device: torch.device) -> Batch:
    return cast(Batch, send_to_device(batch, device))


def _size(batch: Batch) -> int:
    """The number of rows."""
    return next(len(x) for x in batch.values() if isinstance(x, Tensor) and x.ndim)


def _taking_prepared(trainer: Any) -> AbstractContextManager[None]:
    """In the block, the trainer trains on batches that are prepared."""
    return temporarily(trainer, _prepare_inputs=as_current)


@contextmanager
def _without_metrics(trainer: Any) -> Iterator[None]:
    """In the block, what the trainer adds to its metrics is left out, and nothing is gathered for it."""
    totals = {name: getattr(trainer, name) for name in ("_total_train_tokens",) if hasattr(trainer, name)}
    with (
        temporarily(trainer, _metrics={"train": defaultdict(list)}, **totals),
        of_all_ranks(trainer.accelerator, lambda x: x),
    ):
        yield
