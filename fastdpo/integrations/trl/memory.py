"""The reference memory of TRL's DPOTrainers.

A trainer that precomputes reference log-probabilities takes them from its batches. The memory makes
use of this: it adds remembered log-probabilities to each batch, and has the trainer's own
`compute_ref_log_probs` compute those of pairs that it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ...models import support
from ...models.adapters import active_parameters
from ...models.image_content import digests_of_rows
from ...models.images import ARGUMENTS
from ...models.local_shards import reshard
from ...models.wrapped import base_of
from ...reasons import Reason
from ...ref_logps.memory import Memory, digests_of_pairs, key_of
from ..lines import DPO
from ..replacements import temporarily
from .reference import AsReference, as_reference, precision_of, reference_digest, reference_logps, reference_of

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl.trainer.dpo_trainer import DPOTrainer

SUPPORTED_INPUTS = {"input_ids", "attention_mask", "completion_mask"}


class ReferenceMemory(Memory):
    """The reference memory of one DPOTrainer."""

    def __init__(self, option: bool | str):
        super().__init__(option, DPO)

    @contextmanager
    def serving(self, trainer: DPOTrainer, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the batch with its reference log-probabilities, which the trainer uses during the
        block.

        Yields the batch unchanged if the memory is disabled.
        """
        if self.enabled and not self.started:
            self._start(trainer)
        logps = self._of_batch(trainer, inputs) if self.enabled else None
        if logps is None:
            yield inputs
            return
        chosen, rejected = logps
        with temporarily(trainer, precompute_ref_logps=True):
            yield {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def _start(self, trainer: DPOTrainer) -> None:
        from trl.trainer import dpo_trainer

        if trainer.precompute_ref_logps:  # nothing is left to remember
            self.enabled = False
            return

        def key() -> str:
            digest = reference_digest(trainer, as_reference)
            return key_of(digest, precision_of(trainer), trainer.ld_alpha, *_truncation(trainer))

        trainer.add_callback(exchange_callback(self))  # on every rank, since all must take part
        reason = memory_unsupported_reason(trainer, dpo_trainer.DPOTrainer, as_reference)
        self.start(reason, key, device_of_votes(trainer))

    def _digests(self, trainer: DPOTrainer, inputs: dict[str, Any]) -> list[bytes] | Reason:
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

    def _of_batch(self, trainer: DPOTrainer, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """The reference log-probabilities of chosen and rejected completions, [B] each. None if the
        memory is disabled.
        """
        digests = self._digests(trainer, inputs)
        if isinstance(digests, Reason):
            self.disable(digests)
            digests = []
        device = inputs["input_ids"].device

        def compute(missing: list[int]) -> Tensor:
            if inputs.keys() - SUPPORTED_INPUTS:  # images are not cut by rows
                return torch.stack(list(reference_logps(trainer, inputs)), 1)[missing]
            rows = torch.tensor([*missing, *(i + len(digests) for i in missing)], device=device)
            all_missing = len(missing) == len(digests)
            part = inputs if all_missing else {name: inputs[name][rows] for name in SUPPORTED_INPUTS}
            return torch.stack(list(reference_logps(trainer, part)), 1)

        logps = remembered_logps(self, trainer, as_reference, digests, compute, inputs["input_ids"].shape)
        if logps is None:
            return None
        dtype = torch.promote_types(next(reference_of(trainer).parameters()).dtype, torch.float32)
        chosen, rejected = logps.to(device, dtype).unbind(1)
        return chosen, rejected


def _truncation(trainer: Any) -> tuple[object, ...]:
    """How a trainer truncates batches, which TRL does after their collation in version 0.29 only."""
    return (trainer.args.max_length, trainer.args.truncation_mode) if hasattr(trainer, "_truncate_inputs") else ()


def memory_unsupported_reason(trainer: Any, stock: type, as_reference: AsReference) -> Reason | None:
    """Returns why a trainer's reference log-probabilities cannot be
    remembered, or None if they can.
    """
    args = trainer.args
    if args.sync_ref_model:
        return Reason("synced-reference")
    if type(trainer).compute_ref_log_probs is not stock.compute_ref_log_probs:
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
        if support.has_dropout(base):
            return Reason("reference-dropout")
    trained = {id(x) for x in cast(nn.Module, trainer.model).parameters() if x.requires_grad}
    with as_reference(trainer):
        if any(id(x) in trained for x in active_parameters(base)):
            return Reason("trained-reference")
    return None


def device_of_votes(trainer: Any) -> torch.device | None:
    """The device on which ranks agree on running the reference, or None if each has a whole one."""
    return trainer.accelerator.device if support.is_sharded(reference_of(trainer)) else None


def remembered_logps(
    memory: Memory,
    trainer: Any,
    as_reference: AsReference,
    digests: list[bytes],
    compute: Callable[[list[int]], Tensor],
    padded_shape: torch.Size,
) -> Tensor | None:
    """`Memory.log_probs` for a trainer's reference as it is now, and a batch of this padded shape."""
    base = base_of(reference_of(trainer), "reference_memory")
    reshard(reference_of(trainer))
    with as_reference(trainer):
        memory.check(base, padded_shape[1])
    return memory.log_probs(base, digests, compute, padded_shape.numel())


def exchange_callback(memory: Memory) -> TrainerCallback:
    """A callback by which ranks exchange new entries at the end of each
    epoch and after each evaluation.
    """
    from transformers import TrainerCallback

    class ExchangeCallback(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            memory.exchange()

        on_evaluate = on_train_end = on_epoch_end

    return ExchangeCallback()
