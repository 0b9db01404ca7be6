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
from accelerate.utils.memory import clear_device_cache
from numpy.typing import NDArray
from torch import Tensor, nn

from ....logs import logger, warn
from ....models import forward
from ....models.batch import as_current
from ....models.calls import outcomes
from ....reasons import Reason
from ...line import TrainerLine
from ...replacements import Replacements, callback, temporarily
from ...scored_rows import merged
from ..gathering import of_all_ranks
from .learned_tokens import LearnedTokens, OwnTokens, learning
from .planning import UnitPlanner
from .refusals import NotCut, engine_reason, require_supported, say_kept, unsupported_reason, user_code_reason

Batch = dict[str, Any]

STEPS = (
    *(f"transformers.trainer:Trainer.{name}" for name in ("_run_epoch", "training_step", "_prepare_inputs")),
    "transformers.trainer:Trainer._maybe_log_save_evaluate",
    *(f"transformers.trainer:Trainer.{name}" for name in ("get_batch_samples", "_get_num_items_in_batch")),
    *(f"accelerate.accelerator:Accelerator.{name}" for name in ("backward", "no_sync")),
)
"""The functions that make steps of batches (see `TrainerLine.options_rely_on`)."""

OUT_OF_MEMORY = (
    "memory ran out in a step of {} micro-batches; it runs again in the batches of TRL, as all later ones do"
)

AFTER = 3
"""The steps after which a trainer says in how many micro-batches the batches of a step are run."""

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

    max_tokens: int | Literal["own", "auto"] | None

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

    def padded_tokens(self, batch: Batch) -> int:
        """Those of a batch with its padding, in the call that has most."""
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
            functions = f"{', '.join(changed)}, on which max_tokens relies"
            text = f"{self.name}: keeps the batches of TRL, {Reason('changed-code', functions=functions).named}"
            logger.info("fastdpo: %s", text) if self.max_tokens == "own" else warn(text)
            self.max_tokens = None
        if self.max_tokens is not None:
            for name in self.replaced_with_budget:
                self.wrap(name, getattr(self, name))

    def attach(self, trainer: Any) -> None:
        self._attach_budget(trainer)
        super().attach(trainer)

    def _attach_budget(self, trainer: Any) -> None:
        state, is_own = self.state_of(trainer), self.max_tokens == "own"
        if state is None or self.max_tokens is None or (is_own and trainer.args.gradient_accumulation_steps == 1):
            return
        reason = self._uncuttable(trainer)
        if not is_own:
            require_supported(reason or self._user_code_reason(trainer, trainer.model))
        elif reason := engine_reason(trainer) or reason:
            say_kept(self.name, reason)
            return
        state.budget = StepBudget(self, trainer)
        trainer.add_callback(callback(on_step_begin=state.budget.start_step))

    def cuts(self, trainer: Any) -> bool:
        """Whether the steps of a trainer are cut, as far as is known before its first call."""
        return self.budget_of(trainer) is not None and (
            self.max_tokens != "own" or not self._kept_reason(trainer, trainer.model)
        )

    def _uncuttable(self, trainer: Any) -> str | None:
        return unsupported_reason(trainer, self.trainer_class()) or self.uncuttable(trainer)

    def _user_code_reason(self, trainer: Any, model: nn.Module) -> str | None:
        return user_code_reason(trainer, _models(trainer, model), self.trainer_class())

    def _kept_reason(self, trainer: Any, model: nn.Module) -> str | None:
        """The same by default, where other random numbers are a reason as well."""
        is_random = forward.is_random(trainer.model, self.name)
        return self._user_code_reason(trainer, model) or ("a policy that draws random numbers" if is_random else None)

    def step_reason(self, trainer: Any, model: nn.Module) -> str | None:
        """Why the step that begins cannot be cut, with the policy in the wrappers of engines, or None: code that sees
        each batch, or models whose rows may depend on their batch.
        """
        seen = (self._kept_reason if self.max_tokens == "own" else self._user_code_reason)(trainer, model)
        fallbacks = filter(None, map(forward.fallback_reason, _models(trainer, model)))
        return seen or next(
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
        if budget is None or budget.keeps(trainer, model):
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
        kinds: dict[Any, type[LearnedTokens]] = {"own": OwnTokens, "auto": LearnedTokens}
        kind = kinds.get(line.max_tokens)
        self._is_own, self._learned = line.max_tokens == "own", kind and kind(trainer, line.name)
        self._line, self._max_tokens = line, cast(int, line.max_tokens)
        self._is_decided = self._keeps = False  # whether the step has the batches of TRL
        self._has_failed = False  # whether a step has run out of memory
        self._cut_steps = 0
        self._has_said = False  # why batches are kept
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
        self._is_decided = False
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
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        self._model, self._train_on = model, train_on
        self._batches.append(trainer._prepare_inputs(inputs))
        self._has_batches = True
        self._position += 1
        ends_step = self._position == trainer.current_gradient_accumulation_steps
        if ends_step or self._line.must_train(trainer):
            self._train_on_batches(trainer, ends_step)
        return self.loss_since(trainer)

    def keeps(self, trainer: Any, model: nn.Module) -> bool:
        """Whether the step has the batches of TRL, which its first batch decides.

        Raises:
            NotCut: it cannot be cut, and `max_tokens` is not the default.
        """
        model.train()
        if self._is_decided:
            return self._keeps
        self._is_decided, self._keeps = True, self._is_own
        if self._is_own and (self._has_failed or trainer.current_gradient_accumulation_steps == 1):
            return True
        reason = self._line.step_reason(trainer, model)
        if not self._is_own:
            require_supported(reason)
        elif reason is not None:
            self._say_kept(reason)
        else:
            self._keeps = False
        return self._keeps

    def _say_kept(self, reason: str) -> None:
        if not self._has_said:
            self._has_said = True
            say_kept(self._line.name, reason)

    def require_batches(self, trainer: Any) -> None:
        """Raises NotImplementedError if the step that the trainer is about to take was not cut."""
        if self._is_own:
            return
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
            loss = self.loss_since(trainer) + self._train_uncut(trainer, batches, ends_step=False)
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
        try:
            loss = self._train_cut(trainer, batches, ends_step)
        except NotCut as error:
            if not self._is_own:
                raise
            self._say_kept(error.reason)
            loss = None
        if loss is None:
            loss = self._train_uncut(trainer, batches, ends_step)
        self._loss = loss if self._loss is None else self._loss + loss

    def _train_cut(self, trainer: Any, batches: list[Batch], ends_step: bool) -> Tensor | None:
        """Trains on batches in micro-batches. Returns their loss, or None if the trainer has to train on its batches by
        default: these are fewer, or memory has run out, of which nothing is left but a warning.
        """
        batches = [*map(dict, batches)]
        joined = self._line.joined(trainer, batches)
        weights = [x for batch in batches for x in [self._line.weight(trainer, batch)] * self._line.size(batch)]
        micro_batches = self._cut(trainer, batches, joined, weights)
        if self._is_own and len(micro_batches) > len(batches):
            self._count(len(batches), len(batches), ends_step)
            return None
        may_repeat = self._is_own and all(x.grad is None for x in self._model.parameters())
        loss = None
        with _taking_prepared(trainer), temporarily(self, is_running=False, _scored=[]):
            try:
                self._line.score_without_gradients(trainer, self._model, batches, joined, micro_batches)
                self.is_running = True
                loss = self.train(trainer, joined, micro_batches, weights, ends_step)
            except torch.OutOfMemoryError:
                if not may_repeat:
                    raise
            if loss is not None:
                self.log_metrics(trainer, batches, torch.cat(micro_batches))
        if loss is None:  # outside of the block that has the error, which holds tensors
            self._has_failed = True
            self._model.zero_grad()
            del joined
            clear_device_cache(garbage_collection=True)
            warn(f"{self._line.name}: {OUT_OF_MEMORY.format(len(micro_batches))}")
            return None
        self._count(len(batches), len(micro_batches), ends_step)
        return loss

    def _train_uncut(self, trainer: Any, batches: list[Batch], ends_step: bool) -> Tensor:
        """Trains on batches as they are."""
        loss = torch.zeros((), device=trainer.args.device)
        for i, batch in enumerate(batches):
            is_last = ends_step and i == len(batches) - 1
            with _taking_prepared(trainer), self._within_a_step(trainer, is_last):
                loss = loss + self._train_on(batch)
        return loss

    def _within_a_step(self, trainer: Any, is_last: bool) -> AbstractContextManager[None]:
        """A context for a micro-batch of a step, which may be its last one."""
        return learning(self._learned) if is_last else _without_sync(trainer, self._model)

    def _count(self, batches: int, micro_batches: int, ends_step: bool) -> None:
        outcomes[self._line.name, "steps"] += ends_step
        outcomes[self._line.name, "micro-batches"] += micro_batches
        self._cut_steps += ends_step
        if self._is_own and ends_step and self._cut_steps == AFTER:
            text = f"{batches} batches of a step run as about {micro_batches}; max_tokens=None keeps them"
            logger.info("fastdpo: %s: %s", self._line.name, text)

    def _cut(self, trainer: Any, batches: list[Batch], joined: Batch, weights: list[float]) -> list[Tensor]:
        """The units of each micro-batch, which have one weight, by their numbers in the joined batches."""
        share, units = self._line.options.share_prompts, self._line.tokens(joined)
        planner, max_tokens = UnitPlanner(units, weights, share=share), self._max_tokens
        if self._learned is not None:
            ends = itertools.accumulate(map(self._line.size, batches), initial=0)
            of_batches = (units[start:end] for start, end in itertools.pairwise(ends))
            packed = max(UnitPlanner(x, share=share).tokens(0, len(x)) for x in of_batches)
            max_tokens = self._learned.of_step(packed, max(map(self._line.padded_tokens, batches)))
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

    def train(
        self, trainer: Any, joined: Batch, micro_batches: list[Tensor], weights: list[float], ends_step: bool
    ) -> Tensor:
        """Trains on the micro-batches of a step, and returns their loss, a scalar."""
        loss = torch.zeros((), device=trainer.args.device)
        for i, units in enumerate(micro_batches):
            is_last = ends_step and i == len(micro_batches) - 1
            weight = weights[units[0]] * len(units)
            self._scored.append({})
            with (
                self._within_a_step(trainer, is_last),
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
    reference = None if getattr(trainer, "precompute_ref_logps", False) else getattr(trainer, "ref_model", None)
    return [policy] if reference is None else [policy, reference]


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
