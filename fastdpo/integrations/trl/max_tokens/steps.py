"""The steps of one trainer, which are cut into micro-batches.

What TRL logs are numbers of its own batches: its own code computes them, from what the models have returned for the
rows. It does so between the last forward and the last backward of a step, where stock gathers those of its last batch:
the ranks of DDP, which accumulate gradients by themselves, then have the same collectives in the same order, whether a
rank has its steps cut or not.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from ....logs import logger, warn
from ....models.batch import as_current
from ....models.calls import outcomes
from ....packing import IGNORE_INDEX
from ...replacements import Replacements, temporarily
from ...scored_rows import merged
from ..gathering import of_all_ranks
from .learned_tokens import LearnedTokens
from .planning import UnitPlanner
from .refusals import NotCut, require_supported, say_kept

Batch = dict[str, Any]

OUT_OF_MEMORY = (
    "memory ran out in a step of {} micro-batches; it runs again in the batches of TRL, as all later ones do"
)

AFTER = 3
"""The steps after which a trainer says in how many micro-batches the batches of a step are run."""

SCORED = "completion_mask", "KL_completion_mask", "labels"
"""Entries of batches by which tokens are scored."""

Scores = dict[str, Tensor]
"""What models have returned for rows that TRL's loss reads, by name: [R, W] each, or [N] for their units."""


class StepBudget:
    """Cuts the steps of one trainer.

    Args:
        budget: the `Budget` of its line.
        trainer: the trainer.

    Attributes:
        is_running: whether units of a step are trained on, or metrics computed.
        known: the scores of the batch whose metrics are computed, if any are.
    """

    def __init__(self, budget: Any, trainer: Any):
        self._budget, self._trainer, self._name = budget, trainer, budget.line.name
        self._is_own, max_tokens = budget.is_own, budget.line.options.max_tokens
        is_learned = max_tokens in ("own", "auto")
        self._learned = LearnedTokens(trainer, self._name, is_own=self._is_own) if is_learned else None
        self._max_tokens = cast(int, max_tokens)
        self._is_one_of_ranks = self._is_own and trainer.accelerator.num_processes > 1
        self._is_decided = self._keeps = False  # whether the step has the batches of TRL
        self._has_failed = False  # whether a step has run out of memory
        self._has_logged = False  # whether the metrics of the batches that are trained on are computed
        self._cut_steps = 0
        self._largest = 0  # the place of that micro-batch in the step
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
        self._handed_back.close()

    def training_step(self, model: nn.Module, inputs: Any, train_on: Callable[[Batch], Tensor]) -> Tensor:
        """Takes a batch of a step. The last one of the step trains on all that were taken.

        Args:
            model: the policy.
            inputs: what the trainer prepares the batch from.
            train_on: the trainer's own step for a batch, which returns its loss.

        Returns:
            The loss of all units that were trained on since the last batch, a scalar.
        """
        trainer = self._trainer
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        self._model, self._train_on = model, train_on
        self._batches.append(trainer._prepare_inputs(inputs))
        self._has_batches = True
        self._position += 1
        ends_step = self._position == trainer.current_gradient_accumulation_steps
        if ends_step or self._budget.must_train(trainer):
            self._train_on_batches(ends_step)
        return self.loss_since()

    def keeps(self, model: nn.Module) -> bool:
        """Whether the step has the batches of TRL, which its first batch decides.

        Raises:
            NotCut: it cannot be cut, and `max_tokens` is not the default.
        """
        model.train()
        if self._is_decided:
            return self._keeps
        self._is_decided, self._keeps = True, self._is_own
        is_short = self._trainer.current_gradient_accumulation_steps <= self._budget.fewest(self._trainer)
        if self._is_own and (self._has_failed or is_short):
            return True
        reason = self._budget.step_reason(self._trainer, model)
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
            say_kept(self._name, reason)

    def require_batches(self) -> None:
        """Raises NotImplementedError if the step that the trainer is about to take was not cut."""
        if self._is_own:
            return
        stock = self._budget.line.trainer_class().__name__
        own = f"{type(self._trainer).__name__}, whose training_step does not call that of {stock}"
        require_supported(None if self._has_batches else own)

    def catch_up(self) -> None:
        """Trains on the batches that wait for the end of their step."""
        if self._batches:
            self._train_on_batches(ends_step=False)

    def loss_since(self) -> Tensor:
        """The loss of all units that were trained on since the last call, a scalar."""
        loss, self._loss = self._loss, None
        return torch.zeros((), device=self._trainer.args.device) if loss is None else loss

    def hand_back(self) -> None:
        """Has the trainer's own steps train on the batches that were taken, when the next one comes."""

        def training_step(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            self._handed_back.close()
            batches, self._batches = self._batches, []
            loss = self.loss_since() + self._train_uncut(batches, ends_step=False)
            return loss + self._trainer.training_step(model, *args, **kwargs)

        if self._trainer.is_in_train:
            self._handed_back.put(self._trainer, "training_step", training_step)

    def noting(self, model: Any) -> Any:
        """The model that TRL's loss calls: one that notes or knows its scores while a step is cut."""
        if not self.is_running:
            return model

        def call(**inputs: Any) -> Any:
            if self.known is not None:
                return self._budget.output_of(self.known)
            output = model(**inputs)
            self.note(self._budget.scores_of(self._trainer, output, inputs["input_ids"].shape[1]))
            return output

        return call

    def note(self, scores: Scores) -> None:
        """Takes note of scores of the rows that are trained on, if any are."""
        if self.is_running and self.known is None:
            self._scored[-1].update((name, x.detach()) for name, x in scores.items())

    def _train_on_batches(self, ends_step: bool) -> None:
        batches, self._batches = self._batches, []
        self._position *= not ends_step
        self._has_logged, loss = False, None
        try:
            loss = self._train_cut(batches, ends_step)
        except NotCut as error:
            if not self._is_own:
                raise
            self._say_kept(error.reason)
        if loss is None:
            with _without_metrics(self._trainer) if self._has_logged else nullcontext():
                loss = self._train_uncut(batches, ends_step)
        self._loss = loss if self._loss is None else self._loss + loss

    def _train_cut(self, batches: list[Batch], ends_step: bool) -> Tensor | None:
        """Trains on batches in micro-batches. Returns their loss, or None if the trainer has to train on its batches by
        default: these are fewer, or memory has run out, of which nothing is left but metrics and a warning.
        """
        budget, trainer, batches = self._budget, self._trainer, [*map(dict, batches)]
        joined = budget.joined(trainer, batches)
        weights = [x for batch in batches for x in [budget.weight(trainer, batch)] * budget.size(batch)]
        micro_batches = self._cut(batches, joined, weights)
        if self._is_own and len(micro_batches) > len(batches):
            self._count(len(batches), len(batches), ends_step)
            return None
        may_repeat = self._is_own and all(x.grad is None for x in self._model.parameters())
        loss = None
        with _taking_prepared(trainer), temporarily(self, is_running=False, _scored=[]):
            try:
                budget.score_without_gradients(trainer, self._model, batches, joined, micro_batches)
                self.is_running = True
                loss = self.train(batches, joined, micro_batches, weights, ends_step)
            except torch.OutOfMemoryError:
                if not may_repeat or (self._is_one_of_ranks and self._has_logged and ends_step):
                    raise  # other ranks wait for its gradients
        if loss is None:  # outside of the block that has the error, which holds tensors
            self._has_failed = True
            self._model.zero_grad()
            if self._is_one_of_ranks:  # DDP has sent the buffers of this step, but notes it at the end of a forward
                vars(self._model)["require_forward_param_sync"] = False
            del joined
            clear_device_cache(garbage_collection=True)
            warn(f"{self._name}: {OUT_OF_MEMORY.format(len(micro_batches))}")
            return None
        self._count(len(batches), len(micro_batches), ends_step)
        return loss

    def _train_uncut(self, batches: list[Batch], ends_step: bool) -> Tensor:
        """Trains on batches as they are."""
        loss = torch.zeros((), device=self._trainer.args.device)
        for i, batch in enumerate(batches):
            is_last = ends_step and i == len(batches) - 1
            within = nullcontext() if is_last else _without_sync(self._trainer, self._model)
            with _taking_prepared(self._trainer), within:
                loss = loss + self._train_on(batch)
        return loss

    def _count(self, batches: int, micro_batches: int, ends_step: bool) -> None:
        outcomes[self._name, "steps"] += ends_step
        outcomes[self._name, "micro-batches"] += micro_batches
        self._cut_steps += ends_step
        if self._is_own and ends_step and self._cut_steps == AFTER:
            text = f"{batches} batches of a step run as about {micro_batches}; max_tokens=None keeps them"
            logger.info("fastdpo: %s: %s", self._name, text)

    def _cut(self, batches: list[Batch], joined: Batch, weights: list[float]) -> list[Tensor]:
        """The units of each micro-batch, which have one weight, by their numbers in the joined batches."""
        budget, accelerator = self._budget, self._trainer.accelerator
        share, units = budget.line.options.share_prompts, budget.tokens(joined)
        scored = None if self._learned is None else _scored_tokens(joined, len(units))
        planner, max_tokens = UnitPlanner(units, weights, share=share, scored=scored), self._max_tokens
        if self._learned is not None:
            ends = itertools.accumulate(map(budget.size, batches), initial=0)
            of_batches = (units[start:end] for start, end in itertools.pairwise(ends))
            packed = max(UnitPlanner(x, share=share).tokens(0, len(x)) for x in of_batches)
            max_tokens = self._learned.of_step(packed, max(map(budget.padded_tokens, batches)))
            runs = planner.fitting(max_tokens, packed, self._learned.fits)
        else:
            runs = planner.cut(max_tokens)
        largest = max(planner.tokens(*run) for run in runs)
        if largest > max_tokens and self._learned is None and not self._warned:
            self._warned = True
            what = ("a row", "a pair", "a triple")[budget.rows_of_unit - 1]
            tokens = f"{largest} tokens, more than max_tokens={max_tokens}"
            warn(f"{self._name}: {what} has {tokens}, and runs alone")
        if self._is_one_of_ranks:  # the smallest one last, in which there is no way back
            runs = sorted(planner.divided(runs, min(2, len(units))), key=lambda run: -planner.tokens(*run))
        elif accelerator.num_processes > 1:  # each must run the model as often
            counts = accelerator.gather(torch.tensor([len(runs)], device=accelerator.device))
            runs = planner.divided(runs, int(counts.max()))
        sizes = [*map(planner.size, runs)]
        self._largest = sizes.index(max(sizes))
        if self._learned is not None:
            self._learned.ran(max(sizes), is_alone=len(runs) == 1)
        return [torch.tensor(planner.units(run), device="cpu") for run in runs]

    def train(
        self, batches: list[Batch], joined: Batch, micro_batches: list[Tensor], weights: list[float], ends_step: bool
    ) -> Tensor:
        """Trains on the micro-batches of a step, and returns their loss, a scalar."""
        trainer, loss = self._trainer, torch.zeros((), device=self._trainer.args.device)
        for i, units in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            weight = weights[units[0]] * len(units)
            self._scored.append({})
            if self._learned is not None and i == self._largest:
                self._learned.begin_largest()
            with (
                self._computing_losses((batches, torch.cat(micro_batches)) if is_last else None),
                nullcontext() if ends_step and is_last else _without_sync(trainer, self._model),
                temporarily(trainer, current_gradient_accumulation_steps=1 / weight) if weight else nullcontext(),
            ):
                loss = loss + self._train_on(self._budget.micro_batch(trainer, joined, units))
        if ends_step and self._learned is not None:
            self._learned.learn()
        return loss

    @contextmanager
    def _computing_losses(self, ending: tuple[list[Batch], Tensor] | None) -> Iterator[None]:
        """In the block, the trainer computes the loss of a micro-batch without metrics, and then, if it is the last
        one, the metrics of the batches, whose units were trained on in this order.
        """
        trainer, steps = self._trainer, self._trainer.current_gradient_accumulation_steps
        stock = trainer.compute_loss

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            with self._budget.training(trainer), _without_metrics(trainer):
                loss = stock(*args, **kwargs)
            if ending is not None:
                self._has_logged = True
                with temporarily(trainer, current_gradient_accumulation_steps=steps):
                    self._log_metrics(stock, *ending)
            return loss

        with temporarily(trainer, compute_loss=compute_loss):
            yield

    def _log_metrics(self, compute_loss: Callable, batches: list[Batch], units: Tensor) -> None:
        """Has TRL compute the metrics of its own batches, from the scores of the units that were trained on."""
        budget, places = self._budget, units.argsort()
        scored = merged(*({name: budget.units(x) for name, x in scores.items()} for scores in self._scored))
        of_batches = {name: x[places].split([*map(budget.size, batches)]) for name, x in scored.items()}
        for i, batch in enumerate(batches):
            known = {name: _of_width(budget.rows(x[i]), budget.width(batch)) for name, x in of_batches.items()}
            with temporarily(self, known=known), budget.computing_metrics(self._trainer), torch.no_grad():
                compute_loss(self._model, batch)


def on_device(batch: Batch, device: torch.device) -> Batch:
    return cast(Batch, send_to_device(batch, device))


def _of_width(scores: Tensor, width: int) -> Tensor:
    """Scores of rows [R, W], padded or cut to a width. Those of units [N] stay as they are."""
    return scores if scores.ndim == 1 else F.pad(scores, (0, width - scores.shape[1]))


def _taking_prepared(trainer: Any) -> AbstractContextManager[None]:
    """In the block, the trainer trains on batches that are prepared."""
    return temporarily(trainer, _prepare_inputs=as_current)


def _scored_tokens(joined: Batch, n: int) -> list[int] | None:
    """The scored tokens of each of n joined units, or None if no entry of them tells."""
    masks = [(x != IGNORE_INDEX if name == "labels" else x).cpu() for name, x in joined.items() if name in SCORED]
    return torch.stack([x.reshape(n, -1).sum(1) for x in masks]).sum(0).tolist() if masks else None


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
        temporarily(trainer.accelerator, reduce=lambda x, *args, **kwargs: x),
    ):
        yield
