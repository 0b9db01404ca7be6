"""`patch(max_tokens=...)`: the part of a line by which what its trainers train on in a step is cut anew.

The batches that a step accumulates are collected. Their units, which are rows or in trainers of preferences pairs or
triples of rows, are cut into micro-batches, with those that begin alike together. Each micro-batch gets the weight in
the step that its units have in TRL.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ....logs import logger, warn
from ....models import forward
from ....models.parts import base_of
from ....packing import IGNORE_INDEX
from ....reasons import Reason
from ...collating import with_layout
from ...scored_rows import merged
from .dealing import deal
from .refusals import engine_reason, require_supported, say_kept, unsupported_reason, user_code_reason, width_reason
from .steps import Batch, Scores, StepBudget, on_device

if TYPE_CHECKING:
    from ...line import TrainerLine

STEPS = (
    *(f"transformers.trainer:Trainer.{name}" for name in ("_run_epoch", "training_step", "_prepare_inputs")),
    "transformers.trainer:Trainer._maybe_log_save_evaluate",
    *(f"transformers.trainer:Trainer.{name}" for name in ("get_batch_samples", "_get_num_items_in_batch")),
    *(f"accelerate.accelerator:Accelerator.{name}" for name in ("backward", "no_sync")),
)
"""The functions that make steps of batches (see `Budget.relies_on`)."""
_PADDING = {"attention_mask": 0, "completion_mask": 0, "labels": IGNORE_INDEX}
"""The values of entries of a batch behind the last token of a row that is real or has a label. A collator may leave
tokens with labels out of its attention mask, such as the end of a row whose id is that of padding.
"""


@dataclass(kw_only=True, eq=False)
class Budget:
    """How the steps of a trainer are cut. Its line names it as `cutting`.

    A trainer defines its units. By default, they are those of batches that a collator has padded: `input_ids` and
    `attention_mask`, [R, L] each. The host reads such batches once, and packs the micro-batches from there while the
    device computes. `with_line` gives the budget by which a line cuts steps while it is patched.

    Attributes:
        relies_on: the functions that it relies on. In a newer version in which they have other code, batches are kept.
        rows_of_unit: the number of rows that stay together. Batches have the first rows of all units first.
        is_sum: whether the loss of units is the same in any batch. Otherwise that of a batch is the mean over them.
        columns: of the dataset, by the tokens of which its units are dealt to the ranks. Without any, they are not.
        entries: that a batch may have. Those of a name with a prefix have the width of the mask with this prefix.
        fields: of the output of the model, that TRL's loss reads. Those that it may not have requested are None.
        scores: of a row, their number. None: one for each token but the first.
        added: further entries of the joined units, from these and the sizes of their batches.
        uncuttable: what of a trainer keeps its units from weighing the same in any micro-batch, or None.
        line: that has it.
    """

    replaced: ClassVar[tuple[str, ...]] = ("train", "evaluate", "_maybe_log_save_evaluate")

    relies_on: tuple[str, ...]
    rows_of_unit: int = 1
    is_sum: bool = False
    columns: tuple[str, ...] = ()
    entries: frozenset[str] = frozenset()
    fields: tuple[str, ...] = ()
    scores: int | None = None
    added: Callable[[Batch, list[int]], Batch] = lambda joined, sizes: {}
    uncuttable: Callable[[Any], str | None] = lambda trainer: None
    line: TrainerLine = field(init=False)

    # What a trainer defines.

    def must_train(self, trainer: Any) -> bool:
        """Whether the batches that were taken cannot wait for the end of the step."""
        return False

    def size(self, batch: Batch) -> int:
        """The number of units of a batch."""
        return len(batch["input_ids"]) // self.rows_of_unit

    def joined(self, trainer: Any, batches: list[Batch]) -> Batch:
        """The N units of some batches in one. Entries of tokens are [N, rows of a unit, L]."""
        unknown = next((name for batch in batches for name in batch if name not in self.entries), None)
        require_supported(unknown and f"batches with {unknown}")
        units = ({name: self.units(x.cpu()) for name, x in batch.items()} for batch in batches)
        joined = merged(*units, padding=self.line.padding(trainer) or 0)
        is_empty = any(not x.any(-1).all() for name, x in joined.items() if name.endswith("attention_mask"))
        require_supported("rows whose attention mask is 0" if is_empty else None)
        width = joined["input_ids"].shape[-1]  # of which micro-batches may have less
        require_supported(width_reason(base_of(trainer.model, "max_tokens"), width))
        return joined | self.added(joined, [*map(self.size, batches)])

    def tokens(self, joined: Batch) -> list[list[NDArray[np.int64]]]:
        """The tokens of the rows of each unit."""
        ids, real = (joined[name].numpy() for name in ("input_ids", "attention_mask"))
        return [[row[mask != 0] for row, mask in zip(*unit, strict=True)] for unit in zip(ids, real, strict=True)]

    def width(self, batch: Batch) -> int:
        """That of the scores of a batch."""
        return self.scores or batch["input_ids"].shape[1] - 1

    def padded_tokens(self, batch: Batch) -> int:
        """Those of a batch with its padding, in the call that has most."""
        return max(x.numel() for name, x in batch.items() if name.endswith("input_ids"))

    def score_without_gradients(
        self, trainer: Any, model: nn.Module, batches: list[Batch], joined: Batch, micro_batches: list[Tensor]
    ) -> None:
        """Adds to the batches and to their joined units what must be known of all of them before one is trained on."""

    def micro_batch(self, trainer: Any, joined: Batch, units: Tensor) -> Batch:
        """The batch that is trained on for some of the joined units."""
        batch = with_layout(self.picked(trainer, joined, units), self.line.groups, self.line.padding(trainer))
        return on_device(batch, trainer.accelerator.device)

    def picked(self, trainer: Any, joined: Batch, units: Tensor) -> Batch:
        """Some of the joined units, in a batch that is as narrow as their rows are."""
        batch = {name: self.rows(x[units]) for name, x in joined.items()}
        padding = _PADDING | {"input_ids": self.line.padding(trainer)}
        for prefix in ("", "KL_"):
            names = [name for name, x in batch.items() if x.ndim > 1 and name.startswith("KL_") == bool(prefix)]
            known = [(f"{prefix}{name}", x) for name, x in padding.items() if x is not None]
            needed = [batch[name] != x for name, x in known if name in names]
            if needed:
                width = int(torch.stack(needed).any(0).any(0).nonzero().max()) + 1
                batch |= {name: batch[name][:, :width] for name in names}
        return batch

    def weight(self, trainer: Any, batch: Batch) -> float:
        """The weight of each unit of a batch in a step: that of a mean over the units of the batch, in a mean over the
        batches of the step. 0 if the loss of units is the same in any batch.
        """
        return 0 if self.is_sum else 1 / (trainer.current_gradient_accumulation_steps * self.size(batch))

    def training(self, trainer: Any) -> AbstractContextManager[object]:
        """A context in which TRL trains on a micro-batch."""
        return nullcontext()

    def computing_metrics(self, trainer: Any) -> AbstractContextManager[object]:
        """A context in which TRL's loss computes the metrics of a batch whose scores are known."""
        return nullcontext()

    def reason_on_ranks(self, trainer: Any) -> str | None:
        """Why one of several ranks cannot decide by itself whether its steps are cut, or None."""

    def scores_of(self, trainer: Any, output: Any, length: int) -> Scores:
        """What TRL's loss reads of the model's output for rows of this length, without an adapter's virtual tokens."""
        read = {name: getattr(output, name) for name in self.fields}
        return {name: x[:, 1 - length :] for name, x in read.items() if x is not None}

    def output_of(self, known: Scores) -> Any:
        """The output of a model with known scores."""
        return SimpleNamespace(**known)

    # What all of them do.

    def with_line(self, line: TrainerLine) -> Budget | None:
        """That of a line which is being patched, or None if its steps are not to be cut."""
        max_tokens = line.options.max_tokens
        changed = [] if max_tokens is None else line.changed_code(self.relies_on)
        if changed:
            functions = f"{', '.join(changed)}, on which max_tokens relies"
            text = f"{line.name}: keeps the batches of TRL, {Reason('changed-code', functions=functions).named}"
            logger.info("fastdpo: %s", text) if max_tokens == "own" else warn(text)
        if changed or max_tokens is None:
            return None
        budget = copy.copy(self)
        budget.line = line
        for name in self.replaced:
            line.wrap(name, getattr(budget, name))
        return budget

    @property
    def is_own(self) -> bool:
        return self.line.options.max_tokens == "own"

    def attach(self, trainer: Any) -> None:
        """Has the steps of a trainer that was made cut, if they can be."""
        state = self.line.state_of(trainer)
        if state is None or (self.is_own and trainer.args.gradient_accumulation_steps <= self.fewest(trainer)):
            return
        reason = unsupported_reason(trainer, self.line.trainer_class()) or self.uncuttable(trainer)
        if not self.is_own:
            require_supported(reason or self._user_code_reason(trainer, trainer.model))
        elif reason := engine_reason(trainer, self.reason_on_ranks(trainer)) or reason:
            say_kept(self.line.name, reason)
            return
        state.budget = StepBudget(self, trainer)
        state.undo.callback(state.budget.hand_back)

    def fewest(self, trainer: Any) -> int:
        """The fewest micro-batches of a step by default: a rank that runs out of memory in the last one, in whose
        backward ranks reduce gradients, cannot run the step again.
        """
        return 1 if trainer.accelerator.num_processes == 1 else 2

    def cuts(self, trainer: Any) -> bool:
        """Whether the steps of a trainer are cut, as far as is known before its first call."""
        return self._of(trainer) is not None and not (self.is_own and self._kept_reason(trainer, trainer.model))

    def deal(self, trainer: Any, loader: Any) -> None:
        """Has a loader of one of several ranks deal the units of all of them by their tokens, if that is supported."""
        if self.columns and not self.is_own and trainer.accelerator.num_processes > 1:
            deal(loader, self.columns, trainer.args.gradient_accumulation_steps)

    def _user_code_reason(self, trainer: Any, model: nn.Module) -> str | None:
        return user_code_reason(trainer, _models(trainer, model), self.line.trainer_class())

    def _kept_reason(self, trainer: Any, model: nn.Module) -> str | None:
        """The same by default, where other random numbers are a reason as well."""
        is_random = forward.is_random(trainer.model, self.line.name)
        return self._user_code_reason(trainer, model) or ("a policy that draws random numbers" if is_random else None)

    def step_reason(self, trainer: Any, model: nn.Module) -> str | None:
        """Why the step that begins cannot be cut, with the policy in the wrappers of engines, or None: code that sees
        each batch, or models whose rows may depend on their batch.
        """
        seen = (self._kept_reason if self.is_own else self._user_code_reason)(trainer, model)
        if self.is_own and trainer.accelerator.num_processes > 1 and not isinstance(model, DistributedDataParallel):
            seen = seen or "an engine other than DDP, whose ranks would have to agree on each step"
        fallbacks = filter(None, map(forward.fallback_reason, _models(trainer, model)))
        return seen or next(
            (f"models that fall back, since rows may depend on their batch: {x.named}" for x in fallbacks), None
        )

    def _of(self, trainer: Any) -> StepBudget | None:
        """What cuts the steps of a trainer, or None."""
        return getattr(self.line.state_of(trainer), "budget", None)

    def training_step(
        self, stock: Callable, trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """That of a trainer whose steps may be cut."""
        budget = self.line.state_of(trainer).budget
        if budget.keeps(model):
            return stock(trainer, model, inputs, *args, **kwargs)
        return budget.training_step(model, inputs, lambda batch: stock(trainer, model, batch, *args, **kwargs))

    def evaluate(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluates with the metrics of all batches that were taken, as TRL does."""
        budget = self._of(trainer)
        if budget is not None:
            budget.catch_up()
        return stock(trainer, *args, **kwargs)

    train = evaluate  # again, after an exception within a step

    def _maybe_log_save_evaluate(
        self, stock: Callable, trainer: Any, tr_loss: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """At the end of an epoch, a step may have been stopped."""
        budget = self._of(trainer)
        if budget is not None:
            budget.catch_up()
            tr_loss += budget.loss_since()
        stock(trainer, tr_loss, *args, **kwargs)

    def units(self, rows: Tensor) -> Tensor:
        """The rows of a batch [R, W] by units, [N, rows of a unit, W]. Entries [N] stay as they are."""
        return rows if rows.ndim == 1 else rows.unflatten(0, (self.rows_of_unit, -1)).transpose(0, 1)

    def rows(self, units: Tensor) -> Tensor:
        """The inverse of `units`."""
        return units if units.ndim == 1 else units.transpose(0, 1).flatten(0, 1)


def _models(trainer: Any, policy: nn.Module) -> list[nn.Module]:
    """The models that score the batches of a trainer."""
    reference = None if getattr(trainer, "precompute_ref_logps", False) else getattr(trainer, "ref_model", None)
    return [policy] if reference is None else [policy, reference]
