"""The reference memory of OpenRLHF's DPOTrainer."""

# pyright: reportMissingImports=false
# Types are checked in an environment without OpenRLHF.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.parts import base_of
from ...models.sharding import is_sharded
from ...packing import IGNORE_INDEX
from ...ref_logps.memory import Memory, digests_of_pairs, key_of
from ..scored_rows import Inputs
from .batches import Results

if TYPE_CHECKING:
    from openrlhf.trainer.dpo_trainer import DPOTrainer


class LoaderWithCallback:
    """A data loader that calls a function at the end of each epoch."""

    def __init__(self, loader: Any, on_epoch_end: Callable[[], None]):
        self._loader, self._on_epoch_end = loader, on_epoch_end

    def __iter__(self) -> Iterator:
        yield from self._loader
        self._on_epoch_end()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def memory_enabled(trainer: DPOTrainer, memory: Memory, device: torch.device) -> bool:
    """Whether a trainer remembers its reference. Starts its memory with the first batch.

    Args:
        trainer: the trainer.
        memory: its memory.
        device: that of the batch, for collectives. Parameters may be offloaded.
    """
    if memory.enabled and not memory.started:
        from ...ref_logps import keys

        base, temperature = base_of(trainer.ref_model, "reference_memory"), trainer.ref_model.temperature
        vote_on = device if is_sharded(base) else None
        memory.start(None, lambda: key_of("openrlhf", keys.model_digest(base), temperature), vote_on)
    return memory.enabled


def remembered(
    trainer: DPOTrainer, memory: Memory, rows: Inputs, score: Callable[..., Results], *batch: Any
) -> Results:
    """The results of `score` for a reference, which is run on the pairs that are not remembered.

    Args:
        trainer: the trainer.
        memory: its memory.
        rows: of the batch.
        score: computes what `concatenated_forward` returns.
        batch: the arguments of `concatenated_forward`.
    """
    *tensors, prompt_lengths = batch
    ids, scored = rows["input_ids"], rows["labels"] != IGNORE_INDEX
    digests = digests_of_pairs(ids, rows["attention_mask"], scored)

    def compute(missing: list[int]) -> Tensor:
        part = (*(x[missing] for x in tensors), [prompt_lengths[i] for i in missing])
        chosen, rejected, *_ = score(*(batch if len(missing) == len(digests) else part))
        return torch.stack([chosen, rejected], 1)

    base = base_of(trainer.ref_model, "reference_memory")
    memory.check(base, ids.shape[1])
    logps = memory.log_probs(base, digests, compute, ids.numel())
    if logps is None:
        return score(*batch)
    chosen, rejected = logps.to(ids.device, torch.float32).unbind(1)
    return chosen, rejected, [], -(chosen / scored[: len(chosen), 1:].sum(1)).mean()
