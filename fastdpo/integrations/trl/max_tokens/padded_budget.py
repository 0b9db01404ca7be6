"""Trainers whose batches a collator has padded: `input_ids` and `attention_mask`, [R, L] each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....models.parts import base_of
from ....packing import IGNORE_INDEX
from ...collating import with_layout
from ...scored_rows import merged
from .budget import Budget
from .dealing import deal
from .refusals import require_supported, width_reason
from .steps import Batch, Scores, on_device

_PADDING = {"attention_mask": 0, "completion_mask": 0, "labels": IGNORE_INDEX}
"""The values of entries of a batch behind the last token of a row that is real or has a label. A collator may leave
tokens with labels out of its attention mask, such as the end of a row whose id is that of padding.
"""


@dataclass(kw_only=True, eq=False)
class PaddedBudget(Budget):
    """How the steps of such a trainer are cut.

    The host reads these batches once, and packs the micro-batches from there while the device computes.

    Attributes:
        columns: of the dataset, by the tokens of which its units are dealt to the ranks. Without any, they are not.
        entries: that a batch may have. Those of a name with a prefix have the width of the mask with this prefix.
        fields: of the output of the model, that TRL's loss reads. Those that it may not have requested are None.
        scores: of a row, their number. None: one for each token but the first.
        added: further entries of the joined units, from these and the sizes of their batches.
    """

    columns: tuple[str, ...] = ()
    entries: frozenset[str]
    fields: tuple[str, ...] = ()
    scores: int | None = None
    added: Callable[[Batch, list[int]], Batch] = lambda joined, sizes: {}

    def size(self, batch: Batch) -> int:
        return len(batch["input_ids"]) // self.rows_of_unit

    def joined(self, trainer: Any, batches: list[Batch]) -> Batch:
        """Entries of tokens are [N, rows of a unit, L]."""
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
        ids, real = (joined[name].numpy() for name in ("input_ids", "attention_mask"))
        return [[row[mask != 0] for row, mask in zip(*unit, strict=True)] for unit in zip(ids, real, strict=True)]

    def width(self, batch: Batch) -> int:
        return self.scores or batch["input_ids"].shape[1] - 1

    def padded_tokens(self, batch: Batch) -> int:
        return max(x.numel() for name, x in batch.items() if name.endswith("input_ids"))

    def micro_batch(self, trainer: Any, joined: Batch, units: Tensor) -> Batch:
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

    def deal(self, trainer: Any, loader: Any) -> None:
        if self.columns and not self.is_own and trainer.accelerator.num_processes > 1:
            deal(loader, self.columns, trainer.args.gradient_accumulation_steps)

    def scores_of(self, trainer: Any, output: Any, length: int) -> Scores:
        """What TRL's loss reads of the output, without virtual tokens of an adapter."""
        read = {name: getattr(output, name) for name in self.fields}
        return {name: x[:, 1 - length :] for name, x in read.items() if x is not None}

    def output_of(self, known: Scores) -> Any:
        return SimpleNamespace(**known)
