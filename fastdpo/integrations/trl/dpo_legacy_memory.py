"""The reference memory of TRL's DPOTrainer before its rewrite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models.sharding import is_sharded
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ...ref_logps.memory import Memory, digests_of_pairs, key_of
from ..scored_rows import Inputs
from .memory import memory_unsupported_reason, remembered_logps, start
from .reference import precision_of, reference_digest, reference_of

if TYPE_CHECKING:
    DPOTrainer = Any  # types are checked in an environment with another TRL


def remembered(
    trainer: DPOTrainer, memory: Memory, batch: dict[str, Any], inputs_of: Callable[[], Inputs | Reason]
) -> dict[str, Tensor]:
    """The reference's log-probabilities [B] by their names in a batch; nothing if the memory is
    disabled.

    `inputs_of` returns the batch as the model is given it, or the reason why it is not supported.
    """
    if not memory.enabled or "ref_chosen_logps" in batch:  # precomputed
        return {}
    if not memory.started:
        _start(trainer, memory)
    if not memory.enabled:
        return {}
    inputs = inputs_of()
    if isinstance(inputs, Reason):  # the reason is logged when the model is called
        return {}
    digests = digests_of_pairs(inputs["input_ids"], inputs["attention_mask"], inputs["labels"] != IGNORE_INDEX)

    def compute(missing: list[int]) -> Tensor:
        all_missing = len(missing) == len(digests)  # the layout of the same tensors is cached
        part = batch if all_missing else {name: x[missing] for name, x in batch.items() if isinstance(x, Tensor)}
        return torch.stack(list(trainer.compute_ref_log_probs(part)), 1)

    logps = remembered_logps(memory, trainer, _as_reference, digests, compute, inputs["input_ids"].shape)
    if logps is None:
        return {}
    chosen, rejected = logps.to(inputs["input_ids"].device, torch.float32).unbind(1)
    return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def _start(trainer: DPOTrainer, memory: Memory) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    def key() -> str:
        normalized = "ipo" in trainer.loss_type
        return key_of("legacy", reference_digest(trainer, _as_reference), precision_of(trainer), normalized)

    reason = None
    if trainer.is_encoder_decoder:
        reason = Reason("encoder-decoder", model="the model")
    elif is_sharded(reference_of(trainer)):
        reason = Reason("reference-on-ranks")
    start(memory, trainer, reason or memory_unsupported_reason(trainer, DPOTrainer, _as_reference), key)


def _as_reference(trainer: Any) -> AbstractContextManager:
    return nullcontext() if trainer.ref_model is not None else trainer.null_ref_context()
