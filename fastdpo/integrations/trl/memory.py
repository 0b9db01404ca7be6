"""The reference memory of TRL's DPOTrainer since its rewrite in TRL 0.29.

A trainer that precomputes reference log-probabilities takes them from its batches. The memory makes
use of this: it adds remembered log-probabilities to each batch, and has the trainer's own
`compute_ref_log_probs` compute those of pairs that it has not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ...models import sharding
from ...models.adapters import active_parameters
from ...models.facts import has_dropout
from ...models.image_content import digests_of_rows
from ...models.images import ARGUMENTS
from ...models.parts import base_of
from ...models.sharding import reshard
from ...reasons import Reason
from ...ref_logps.memory import Memory, digests_of_pairs, key_of
from ..replacements import callback, temporarily
from .models import as_reference, precision_of, reference_digest, reference_logps, reference_of

if TYPE_CHECKING:
    from trl.trainer.dpo_trainer import DPOTrainer

SUPPORTED_INPUTS = {"input_ids", "attention_mask", "completion_mask"}


@contextmanager
def serving(memory: Memory, trainer: DPOTrainer, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the batch with its reference log-probabilities, which the trainer uses during the block.

    Yields the batch unchanged if the memory is disabled.
    """
    if memory.enabled and not memory.started:
        _start(memory, trainer)
    logps = _of_batch(memory, trainer, inputs) if memory.enabled else None
    if logps is None:
        yield inputs
        return
    chosen, rejected = logps.unbind(1)
    with temporarily(trainer, precompute_ref_logps=True):
        yield {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def _start(memory: Memory, trainer: DPOTrainer) -> None:
    """Starts the memory. Ranks exchange new entries at the end of each epoch and after each evaluation."""
    if trainer.precompute_ref_logps:  # nothing is left to remember
        memory.enabled = False
        return

    def key() -> str:
        return key_of(reference_digest(trainer), precision_of(trainer), trainer.ld_alpha, *_truncation(trainer))

    def exchange(*args: Any, **kwargs: Any) -> None:
        memory.exchange()

    # On every rank, since all must take part.
    trainer.add_callback(callback(on_epoch_end=exchange, on_evaluate=exchange, on_train_end=exchange))
    # Ranks agree on running the reference on this device, unless each has a whole one.
    vote_on = trainer.accelerator.device if sharding.is_sharded(reference_of(trainer)) else None
    memory.start(memory_unsupported_reason(trainer), key, vote_on)


def _digests(trainer: DPOTrainer, inputs: dict[str, Any]) -> list[bytes] | Reason:
    """The digests of the pairs of a batch, or why they have none."""
    from trl.trainer import dpo_trainer

    given = {name for name, x in inputs.items() if x is not None}
    takes_images = hasattr(dpo_trainer, "add_fused_lm_head")  # earlier versions of TRL are not tested with them
    others = given - SUPPORTED_INPUTS - {*(ARGUMENTS if takes_images else ())}
    if others:
        return Reason("batch-entries", names=", ".join(sorted(others)))
    contents = None
    if given - SUPPORTED_INPUTS:
        contents = digests_of_rows(base_of(reference_of(trainer), "reference_memory"), inputs)
        if isinstance(contents, Reason):
            return contents
    return digests_of_pairs(inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"], contents)


def _of_batch(memory: Memory, trainer: DPOTrainer, inputs: dict[str, Tensor]) -> Tensor | None:
    """The reference log-probabilities of chosen and rejected completions, [B, 2]. None if the memory is
    disabled.
    """
    digests = _digests(trainer, inputs)
    if isinstance(digests, Reason):
        memory.disable(digests)
        digests = []
    device = inputs["input_ids"].device

    def compute(missing: list[int]) -> Tensor:
        if inputs.keys() - SUPPORTED_INPUTS:  # images are not cut by rows
            return torch.stack(list(reference_logps(trainer, inputs)), 1)[missing]
        rows = torch.tensor([*missing, *(i + len(digests) for i in missing)], device=device)
        all_missing = len(missing) == len(digests)
        part = inputs if all_missing else {name: inputs[name][rows] for name in SUPPORTED_INPUTS}
        return torch.stack(list(reference_logps(trainer, part)), 1)

    reference, width = reference_of(trainer), inputs["input_ids"].shape[1]
    base = base_of(reference, "reference_memory")
    reshard(reference)
    with as_reference(trainer):
        memory.check(base, width)
    logps = memory.log_probs(base, digests, compute, inputs["input_ids"].numel())
    dtype = torch.promote_types(next(reference.parameters()).dtype, torch.float32)
    return None if logps is None else logps.to(device, dtype)


def _truncation(trainer: Any) -> tuple[object, ...]:
    """How a trainer truncates batches, which TRL does after their collation in version 0.29 only."""
    return (trainer.args.max_length, trainer.args.truncation_mode) if hasattr(trainer, "_truncate_inputs") else ()


def memory_unsupported_reason(trainer: Any) -> Reason | None:
    """Returns why a trainer's reference log-probabilities cannot be
    remembered, or None if they can.
    """
    from trl.trainer.dpo_trainer import DPOTrainer

    args = trainer.args
    if args.sync_ref_model:
        return Reason("synced-reference")
    if type(trainer).compute_ref_log_probs is not DPOTrainer.compute_ref_log_probs:
        return Reason("own-reference", trainer=type(trainer).__name__)
    parallelism = trainer.accelerator.parallelism_config
    if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
        return Reason("reference-on-ranks")
    if any(isinstance(module, FullyShardedDataParallel) for module in reference_of(trainer).modules()):
        return Reason("fsdp1")
    base = base_of(reference_of(trainer), "reference_memory")
    if trainer.ref_model is None:  # the reference is the policy without its adapter, in the policy's mode
        if args.neftune_noise_alpha:
            return Reason("reference-neftune")
        if has_dropout(base):
            return Reason("reference-dropout")
    trained = {id(x) for x in cast(nn.Module, trainer.model).parameters() if x.requires_grad}
    with as_reference(trainer):
        if any(id(x) in trained for x in active_parameters(base)):
            return Reason("trained-reference")
    return None
