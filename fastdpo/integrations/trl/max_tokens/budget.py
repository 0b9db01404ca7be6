"""`patch(max_tokens=...)`: what a trainer trains on in a step is cut anew, by a budget of tokens.

The batches that a step accumulates are collected. Their units, which are rows or in trainers of preferences pairs or
triples of rows, are cut into micro-batches, with those that begin alike together. Each micro-batch gets the weight in
the step that its units have in TRL. What TRL logs are numbers of its own batches: its own code computes them, from what
the models have returned for the rows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from numpy.typing import NDArray
from torch import Tensor, nn

from ....logs import warn
from ....models import forward
from ....models.batch import as_current
from ....models.calls import outcomes
from ....reasons import Reason
from ...line import TrainerLine
from ...replacements import Replacements, callback, temporarily
from ...scored_rows import merged
from ..gathering import of_all_ranks
from .learned_tokens import LearnedTokens, learning
from .planning import UnitPlanner
from .refusals import require_supported, unsupported_reason, user_code_reason

Batch = dict[str, Any]

STEPS = (
    *(f"transformers.trainer:Trainer.{name}" for name in ("_run_epoch", "training_step", "_prepare_inputs")),
    "transformers.trainer:Trainer._maybe_log_save_evaluate",
    *(f"transformers.trainer:Trainer.{name}" for name in ("get_batch_samples", "_get_num_items_in_batch")),
    *(f"accelerate.accelerator:Accelerator.{name}" for name in ("backward", "no_sync")),
)
"""The functions that make steps of batches (see `TrainerLine.options_rely_on`)."""

FILLED = "cuda"
"""The type of devices that wait for the host while batches are small."""

ADVICE = (
    'a step accumulates {} batches; fastdpo.patch(max_tokens="auto") trains on the same rows in as few as fit the '
    "device, which is faster where they are small"
)

Scores = dict[str, Tensor]
"""What models have returned for rows that TRL's loss reads, by name: [R, W] each, or [N] for their units."""


class BudgetLine(TrainerLine):
    """The line of a trainer whose steps are cut.

    Attributes:
        replaced_with_budget: functions of the class that are replaced with `max_tokens` only.
        rows_of_unit: the number of rows that stay together. Batches have the first rows of all units first.
        max_tokens: the option of `patch()`, or None if code that it relies on has changed.
    """

    replaced_with_budget: ClassVar[tuple[str, ...]] = ("training_step", "train", "evaluate", "_maybe_log_save_evaluate")
    rows_of_unit: ClassVar[int] = 1

    max_tokens: int | Literal["auto"] | None

    # What a trainer defines.

    def uncuttable(self, trainer: Any) -> str | None:
        """What of a trainer keeps its units from weighing the same in any micro-batch, or None."""

    def must_train(self, trainer: Any) -> bool:
        """Whether the batches that were taken cannot wait for the end of the step."""
        return False

    def size(self, batch: Batch) -> int:
        """The number of units of a batch."""
        raise NotImplementedError

    def joined(self, trainer: Any, batches: list[Batch]) -> Batch:
        """The N units of some batches in one."""
        raise NotImplementedError

    def tokens(self, joined: Batch) -> list[list[NDArray[np.int64]]]:
        """The tokens of the rows of each unit."""
        raise NotImplementedError

    def width(self, batch: Batch) -> int:
        """That of the scores of a batch."""
        raise NotImplementedError

    def score_without_gradients(
        self, trainer: Any, model: nn.Module, batches: list[Batch], joined: Batch, micro_batches: list[Tensor]
    ) -> None:
        """Adds to the batches and to their joined units what must be known of all of them before one is trained on."""

    def micro_batch(self, trainer: Any, joined: Batch, units: Tensor) -> Batch:
        """The batch that is trained on for some of the joined units."""
        raise NotImplementedError

    def weight(self, trainer: Any, batch: Batch) -> float:
        """The weight of each unit of a batch in a step: that of a mean over the units of the batch, in a mean over the
        batches of the step. 0 if the loss of units is the same in any batch.
        """
        return 1 / (trainer.current_gradient_accumulation_steps * self.size(batch))

    def training(self, trainer: Any) -> AbstractContextManager[object]:
        """A context in which TRL trains on a micro-batch."""
        return nullcontext()

    def computing_metrics(self, trainer: Any) -> AbstractContextManager[object]:
        """A context in which TRL's loss computes the metrics of a batch whose scores are known."""
        return nullcontext()

    # What all of them do.

    def replace(self) -> None:
        super().replace()
        self.max_tokens = self.options.max_tokens
        changed = [] if self.max_tokens is None else self.changed_code(self.options_rely_on["max_tokens"])
        if changed:
            self.max_tokens = None
            functions = f"{', '.join(changed)}, on which max_tokens relies"
            warn(f"{self.name}: keeps the batches of TRL, {Reason('changed-code', functions=functions).named}")
        if self.max_tokens is not None:
            for name in self.replaced_with_budget:
                self.wrap(name, getattr(self, name))

    def attach(self, trainer: Any) -> None:
        state = self.state_of(trainer)
        if state is not None and self.max_tokens is not None:
            user_code = user_code_reason(trainer, _models(trainer, trainer.model), self.trainer_class())
            require_supported(self._uncuttable(trainer) or user_code)
            state.budget = StepBudget(self, trainer)
            trainer.add_callback(callback(on_step_begin=state.budget.start_step))
        elif state is not None:
            self._advise(trainer)
        super().attach(trainer)

    def _advise(self, trainer: Any) -> None:
        """Names the option to who accumulates batches on a device that they may not fill."""
        batches, device = trainer.args.gradient_accumulation_steps, trainer.args.device
        if batches > 1 and device.type == FILLED and trainer.args.process_index == 0 and not self._uncuttable(trainer):
            warn(f"{self.name}: {ADVICE.format(batches)}")

    def _uncuttable(self, trainer: Any) -> str | None:
        return unsupported_reason(trainer, self.trainer_class()) or self.uncuttable(trainer)

    def step_reason(self, trainer: Any, model: nn.Module) -> str | None:
        """Why the step that begins cannot be cut, with the policy in the wrappers of engines, or None: code that sees
        each batch, or models whose rows may depend on their batch.
        """
        models = _models(trainer, model)
        fallbacks = filter(None, map(forward.fallback_reason, models))
        return user_code_reason(trainer, models, self.trainer_class()) or next(
            (f"models that fall back, since rows may depend on their batch: {x.named}" for x in fallbacks), None
        )

    def disable(self) -> None:
        budgets = [(trainer, self.budget_of(trainer)) for trainer in self.trainers()]
        super().disable()
        for trainer, budget in budgets:
            if budget is not None:
                budget.hand_back(trainer)

    def budget_of(self, trainer: Any) -> StepBudget | None:
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

    def units(self, rows: Tensor) -> Tensor:
        """The rows of a batch [R, W] by units, [N, rows of a unit, W]. Entries [N] stay as they are."""
        return rows if rows.ndim == 1 else rows.unflatten(0, (self.rows_of_unit, -1)).transpose(0, 1)

    def rows(self, units: Tensor) -> Tensor:
        """The inverse of `units`."""
        return units if units.ndim == 1 else units.transpose(0, 1).flatten(0, 1)


class StepBudget:
    """Cuts the steps of one trainer of a line.

    Attributes:
        is_running: whether units of a step are trained on, or metrics computed.
        known: the scores of the batch whose metrics are computed, if any are.
    """

    def __init__(self, line: BudgetLine, trainer: Any):
        is_learned = line.max_tokens == "auto"
        self._learned = LearnedTokens(trainer, line.name) if is_learned else None
        self._line, self._max_tokens = line, 0 if is_learned else cast(int, line.max_tokens)
        self._batches: list[Batch] = []  # of the step, not trained on yet
        self._position = 0  # in the step, of the next batch
        self._has_batches = False  # of the step, which may have been trained on
        self._scored: list[Scores] = []  # by the micro-batches that were trained on
        self.is_running = False
        self.known: Scores | None = None
        self._loss: Tensor | None = None  # of the units that were trained on, if it was not returned yet
        self._model: nn.Module  # the policy, in the wrappers of engines
        self._train_on: Callable[[Batch], Tensor]
        self._handed_back = Replacements()
        self._warned = False

    def start_step(self, *args: Any, **kwargs: Any) -> None:
        """Begins a step. A training that was stopped within one may have left its position."""
        self._batches, self._position, self._loss, self._has_batches = [], 0, None, False
        self._handed_back.undo()

    def training_step(self, trainer: Any, model: nn.Module, inputs: Any, train_on: Callable[[Batch], Tensor]) -> Tensor:
        """Takes a batch of a step. The last one of the step trains on all that were taken.

        Args:
            trainer: the trainer.
            model: the policy.
            inputs: what the trainer prepares the batch from.
            train_on: the trainer's own step for a batch, which returns its loss.

        Returns:
            The loss of all units that were trained on since the last batch, a scalar.
        """
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        if self._position == 0:
            require_supported(self._line.step_reason(trainer, model))
        self._model, self._train_on = model, train_on
        self._batches.append(trainer._prepare_inputs(inputs))
        self._has_batches = True
        self._position += 1
        ends_step = self._position == trainer.current_gradient_accumulation_steps
        if ends_step or self._line.must_train(trainer):
            self._train_on_batches(trainer, ends_step)
        return self.loss_since(trainer)

    def require_batches(self, trainer: Any) -> None:
        """Raises NotImplementedError if the step that the trainer is about to take was not cut."""
        stock = self._line.trainer_class().__name__
        own = f"{type(trainer).__name__}, whose training_step does not call that of {stock}"
        require_supported(None if self._has_batches else own)

    def catch_up(self, trainer: Any) -> None:
        """Trains on the batches that wait for the end of their step."""
        if self._batches:
            self._train_on_batches(trainer, ends_step=False)

    def loss_since(self, trainer: Any) -> Tensor:
        """The loss of all units that were trained on since the last call, a scalar."""
        loss, self._loss = self._loss, None
        return torch.zeros((), device=trainer.args.device) if loss is None else loss

    def hand_back(self, trainer: Any) -> None:
        """Has the trainer's own steps train on the batches that were taken, when the next one comes."""

        def training_step(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            self._handed_back.undo()
            batches, self._batches = self._batches, []
            loss = self.loss_since(trainer)
            for batch in batches:
                with _taking_prepared(trainer), _without_sync(trainer, model):
                    loss = loss + self._train_on(batch)
            return loss + trainer.training_step(model, *args, **kwargs)

        if trainer.is_in_train:
            self._handed_back.put(trainer, "training_step", training_step)

    def note(self, scores: Scores) -> None:
        """Takes note of scores of the rows that are trained on, if any are."""
        if self.is_running and self.known is None:
            self._scored[-1].update((name, x.detach()) for name, x in scores.items())

    def _train_on_batches(self, trainer: Any, ends_step: bool) -> None:
        batches, self._batches = self._batches, []
        self._position *= not ends_step
        joined = self._line.joined(trainer, batches)
        weights = [x for batch in batches for x in [self._line.weight(trainer, batch)] * self._line.size(batch)]
        micro_batches = self._cut(trainer, batches, joined, weights)
        outcomes[self._line.name, "steps"] += ends_step
        outcomes[self._line.name, "micro-batches"] += len(micro_batches)
        with _taking_prepared(trainer):
            self._line.score_without_gradients(trainer, self._model, batches, joined, micro_batches)
            with temporarily(self, is_running=True, _scored=[]):
                loss = self._train(trainer, joined, micro_batches, weights, ends_step)
                self.log_metrics(trainer, batches, torch.cat(micro_batches))
        self._loss = loss if self._loss is None else self._loss + loss

    def _cut(self, trainer: Any, batches: list[Batch], joined: Batch, weights: list[float]) -> list[Tensor]:
        """The units of each micro-batch, which have one weight, by their numbers in the joined batches."""
        share, units = self._line.options.share_prompts, self._line.tokens(joined)
        planner, max_tokens = UnitPlanner(units, weights, share=share), self._max_tokens
        if self._learned is not None:
            ends = itertools.accumulate(map(self._line.size, batches), initial=0)
            of_batches = (units[start:end] for start, end in itertools.pairwise(ends))
            max_tokens = self._learned.of_step(max(UnitPlanner(x, share=share).tokens(0, len(x)) for x in of_batches))
        runs = planner.cut(max_tokens)
        largest = max(planner.tokens(*run) for run in runs)
        if largest > max_tokens and self._learned is None and not self._warned:
            self._warned = True
            what = ("a row", "a pair", "a triple")[self._line.rows_of_unit - 1]
            tokens = f"{largest} tokens, more than max_tokens={max_tokens}"
            warn(f"{self._line.name}: {what} has {tokens}, and runs alone")
        if trainer.accelerator.num_processes > 1:  # each must run the model as often
            counts = trainer.accelerator.gather(torch.tensor([len(runs)], device=trainer.accelerator.device))
            runs = planner.divided(runs, int(counts.max()))
        if self._learned is not None:
            self._learned.ran(max(planner.tokens(*run) for run in runs))
        return [torch.tensor(planner.units(run), device="cpu") for run in runs]

    def _train(
        self, trainer: Any, joined: Batch, micro_batches: list[Tensor], weights: list[float], ends_step: bool
    ) -> Tensor:
        loss = torch.zeros((), device=trainer.args.device)
        for i, units in enumerate(micro_batches):
            is_last = ends_step and i == len(micro_batches) - 1
            weight = weights[units[0]] * len(units)
            self._scored.append({})
            with (
                learning(self._learned) if is_last else _without_sync(trainer, self._model),
                temporarily(trainer, current_gradient_accumulation_steps=1 / weight) if weight else nullcontext(),
                self._line.training(trainer),
                _without_metrics(trainer),
            ):
                loss = loss + self._train_on(self._line.micro_batch(trainer, joined, units))
        return loss

    def log_metrics(self, trainer: Any, batches: list[Batch], units: Tensor) -> None:
        """Has TRL compute the metrics of its own batches, from the scores of the units that were trained on."""
        line, places = self._line, units.argsort()
        scored = merged(*({name: line.units(x) for name, x in scores.items()} for scores in self._scored))
        of_batches = {name: x[places].split([*map(line.size, batches)]) for name, x in scored.items()}
        for i, batch in enumerate(batches):
            known = {name: _of_width(line.rows(x[i]), line.width(batch)) for name, x in of_batches.items()}
            with (
                temporarily(self, known=known),
                line.computing_metrics(trainer),
                torch.no_grad(),
                trainer.compute_loss_context_manager(),
            ):
                trainer.compute_loss(self._model, batch)


def on_device(batch: Batch, device: torch.device) -> Batch:
    return cast(Batch, send_to_device(batch, device))


def _models(trainer: Any, policy: nn.Module) -> list[nn.Module]:
    """The models that score the batches of a trainer."""
    return [x for x in (policy, getattr(trainer, "ref_model", None)) if x is not None]


def _of_width(scores: Tensor, width: int) -> Tensor:
    """Scores of rows [R, W], padded or cut to a width. Those of units [N] stay as they are."""
    return scores if scores.ndim == 1 else F.pad(scores, (0, width - scores.shape[1]))


def _taking_prepared(trainer: Any) -> AbstractContextManager[None]:
    """In the block, the trainer trains on batches that are prepared."""
    return temporarily(trainer, _prepare_inputs=as_current)


@contextmanager
def _without_sync(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without reducing them, as the Trainer does before the end of a step."""
    accelerator = trainer.accelerator
    before = accelerator.sync_gradients
    accelerator.gradient_state._set_sync_gradients(False)  # read by accelerate's backward pass for DeepSpeed
    try:
        with nullcontext() if trainer.is_deepspeed_enabled else accelerator.no_sync(model):
            yield
    finally:
        accelerator.gradient_state._set_sync_gradients(before)


@contextmanager
def _without_metrics(trainer: Any) -> Iterator[None]:
    """In the block, what the trainer adds to its metrics is left out, and nothing is gathered for it."""
    totals = {name: getattr(trainer, name) for name in ("_total_train_tokens",) if hasattr(trainer, name)}
    with (
        temporarily(trainer, _metrics={"train": defaultdict(list)}, **totals),
        of_all_ranks(trainer.accelerator, lambda x: x),
    ):
        yield
