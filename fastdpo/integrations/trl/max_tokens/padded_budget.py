"""Trainers whose batches a collator has padded: `input_ids` and `attention_mask`, [R, L] each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....models.parts import base_of
from ....models.state import Groups
from ....packing import IGNORE_INDEX
from ...collating import packing_batches, with_layout
from ...scored_rows import merged
from .budget import Batch, BudgetLine, Scores, on_device
from .dealing import deal
from .refusals import require_supported, width_reason

_PADDING = {"attention_mask": 0, "completion_mask": 0, "labels": IGNORE_INDEX}
"""The values of entries of a batch behind the last token of a row that is real or has a label. A collator may leave
tokens with labels out of its attention mask, such as the end of a row whose id is that of padding.
"""


class PaddedBudgetLine(BudgetLine):
    """The line of such a trainer.

    The host reads these batches once, and packs the micro-batches from there while the device computes.

    Attributes:
        columns: of the dataset, by the tokens of which its units are dealt to the ranks. Without any, they are not.
        entries: that a batch may have. Those of a name with a prefix have the width of the mask with this prefix.
        fields: of the output of the model, that TRL's loss reads. Those that it may not have requested are None.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    entries: ClassVar[frozenset[str]]
    fields: ClassVar[tuple[str, ...]]

    def size(self, batch: Batch) -> int:
        return len(batch["input_ids"]) // self.rows_of_unit

    def joined(self, trainer: Any, batches: list[Batch]) -> Batch:
        """Entries of tokens are [N, rows of a unit, L]."""
        unknown = next((name for batch in batches for name in batch if name not in self.entries), None)
        require_supported(unknown and f"batches with {unknown}")
        units = ({name: self.units(x.cpu()) for name, x in batch.items()} for batch in batches)
        joined = merged(*units, padding=self.padding(trainer) or 0)
        is_empty = any(not x.any(-1).all() for name, x in joined.items() if name.endswith("attention_mask"))
        require_supported("rows whose attention mask is 0" if is_empty else None)
        width = joined["input_ids"].shape[-1]  # of which micro-batches may have less
        require_supported(width_reason(base_of(trainer.model, "max_tokens"), width))
        return joined

    def tokens(self, joined: Batch) -> list[list[NDArray[np.int64]]]:
        ids, real = (joined[name].numpy() for name in ("input_ids", "attention_mask"))
        return [[row[mask != 0] for row, mask in zip(*unit, strict=True)] for unit in zip(ids, real, strict=True)]

    def width(self, batch: Batch) -> int:
        return batch["input_ids"].shape[1] - 1

    def padded_tokens(self, batch: Batch) -> int:
        return max(x.numel() for name, x in batch.items() if name.endswith("input_ids"))

    def micro_batch(self, trainer: Any, joined: Batch, units: Tensor) -> Batch:
        batch = with_layout(self.picked(trainer, joined, units), self._groups, self.padding(trainer))
        return on_device(batch, trainer.accelerator.device)

    @property
    def _groups(self) -> Groups | None:
        return "content" if self.options.share_prompts else None

    def padding(self, trainer: Any) -> int | None:
        """The id of padding, if the trainer trains a reward model, which scores the last token with another one."""

    def picked(self, trainer: Any, joined: Batch, units: Tensor) -> Batch:
        """Some of the joined units, in a batch that is as narrow as their rows are."""
        batch = {name: self.rows(x[units]) for name, x in joined.items()}
        padding = _PADDING | {"input_ids": self.padding(trainer)}
        for prefix in ("", "KL_"):
            names = [name for name, x in batch.items() if x.ndim > 1 and name.startswith("KL_") == bool(prefix)]
            known = [(f"{prefix}{name}", x) for name, x in padding.items() if x is not None]
            needed = [batch[name] != x for name, x in known if name in names]
            if needed:
                width = int(torch.stack(needed).any(0).any(0).nonzero().max()) + 1
                batch |= {name: batch[name][:, :width] for name in names}
        return batch

    def get_train_dataloader(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """With batches that come with their layouts. Where steps are cut, units are dealt to the ranks instead."""
        state = self.state_of(trainer)
        if state is not None and not self.cuts(trainer):
            with packing_batches(trainer, self._groups, self.padding(trainer)):
                return stock(trainer, *args, **kwargs)
        loader = stock(trainer, *args, **kwargs)
        if state is not None and self.columns and trainer.accelerator.num_processes > 1:
            deal(loader, self.columns, trainer.args.gradient_accumulation_steps)
        return loader

    def noting(self, trainer: Any, model: Any) -> Any:
        """The model that TRL's loss calls: one that notes or knows its scores while a step is cut."""
        budget = self.budget_of(trainer)
        if budget is None or not budget.is_running:
            return model

        def call(**inputs: Any) -> Any:
            if budget.known is not None:
                return self.output_of(budget.known)
            output = model(**inputs)
            budget.note(self.scores_of(trainer, output, inputs["input_ids"].shape[1]))
            return output

        return call

    def scores_of(self, trainer: Any, output: Any, length: int) -> Scores:
        """What TRL's loss reads of the output of the model for rows of this length, without virtual tokens of an
        adapter.
        """
        read = {name: getattr(output, name) for name in self.fields}
        return {name: x[:, 1 - length :] for name, x in read.items() if x is not None}

    def output_of(self, known: Mapping[str, Tensor]) -> Any:
        """The output of a model with known scores."""
        return SimpleNamespace(**known)
