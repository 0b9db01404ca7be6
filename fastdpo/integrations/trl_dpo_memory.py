"""The reference memory of TRL's DPOTrainers.

A trainer that precomputes reference log-probabilities takes them from its batches. The memory uses that way in: it adds
them to each batch, those of pairs that it has not seen from the trainer's own `compute_ref_log_probs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .reference_memory import Memory, digests_of_pairs, key_of
from .trl_dpo import NAME
from .trl_dpo_precompute import as_reference, reference_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback
    from trl.trainer.dpo_trainer import DPOTrainer

TAKEN = {"input_ids", "attention_mask", "completion_mask"}


class ReferenceMemory(Memory):
    """Ranks tell each other at the end of an epoch and after an evaluation."""

    def __init__(self, option: bool | Path):
        super().__init__(option, NAME)

    @contextmanager
    def serving(self, trainer: DPOTrainer, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The batch with its reference log-probabilities, and a trainer that takes them from it while the block lasts.

        The batch as it came where the memory is off.
        """
        if self.on and not self.begun:
            self._begin(trainer)
        if self.on and not {name for name, x in inputs.items() if x is not None} <= TAKEN:
            self.turn_off(f"batches hold {', '.join(sorted(inputs.keys() - TAKEN))} too")
        if not self.on:
            yield inputs
            return
        chosen, rejected = self._of_batch(trainer, inputs)
        trainer.precompute_ref_logps = True
        try:
            yield {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        finally:
            trainer.precompute_ref_logps = False

    def _begin(self, trainer: DPOTrainer) -> None:
        from trl.trainer import dpo_trainer

        if trainer.precompute_ref_logps:  # nothing is left to remember
            self.on = False
            return

        def key() -> str:
            return key_of(model_digest(trainer, as_reference), precision_of(trainer), trainer.ld_alpha)

        trainer.add_callback(sharing(self))  # on every rank, since all must take part
        self.begin(why_not(trainer, dpo_trainer.DPOTrainer, as_reference), key)

    def _of_batch(self, trainer: DPOTrainer, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Chosen and rejected, [B] each."""
        digests = digests_of_pairs(*(inputs[name] for name in ("input_ids", "attention_mask", "completion_mask")))
        device = inputs["input_ids"].device

        def compute(missing: list[int]) -> Tensor:
            rows = torch.tensor([*missing, *(i + len(digests) for i in missing)], device=device)
            part = inputs if len(missing) == len(digests) else {name: inputs[name][rows] for name in TAKEN}
            return torch.stack(list(trainer.compute_ref_log_probs(reference_of(trainer), part)), 1)

        found = log_probs(self, trainer, as_reference, digests, compute)
        wide = torch.promote_types(next(reference_of(trainer).parameters()).dtype, torch.float32)
        chosen, rejected = found.to(device, wide).unbind(1)
        return chosen, rejected


def why_not(trainer: Any, stock: type, as_reference: Callable[[Any], AbstractContextManager]) -> str | None:
    """Why a trainer's reference can't be remembered. `as_reference` makes a policy its own reference."""
    from ..ref_logps import keys, models

    args = trainer.args
    if args.sync_ref_model:
        return "the reference follows the policy (sync_ref_model)"
    if type(trainer).compute_ref_log_probs is not stock.compute_ref_log_probs:
        return f"{type(trainer).__name__} has a compute_ref_log_probs of its own"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.accelerator.parallelism_config is not None:
        return "ranks run the reference together, and could disagree on leaving it out"
    base = models.base_of(reference_of(trainer))
    if trainer.ref_model is None:  # it is the policy without its adapter, in the policy's mode
        if args.neftune_noise_alpha:
            return "NEFTune's noise reaches the reference"
        if _drops(base):
            return "dropout is active in the reference"
    trained = {id(x) for x in cast(nn.Module, trainer.model).parameters() if x.requires_grad}
    with as_reference(trainer):
        if any(id(x) in trained for x in keys.active_parameters(base)):
            return "weights that the reference has are trained"
    return None


def log_probs(
    memory: Memory,
    trainer: Any,
    as_reference: Callable[[Any], AbstractContextManager],
    digests: list[bytes],
    compute: Callable[[list[int]], Tensor],
) -> Tensor:
    """`memory.log_probs` of a trainer's reference as it is now."""
    from ..ref_logps import models

    base = models.base_of(reference_of(trainer))
    with as_reference(trainer):
        memory.check(base)
    return memory.log_probs(base, digests, compute)


def model_digest(trainer: Any, as_reference: Callable[[Any], AbstractContextManager]) -> str:
    from ..ref_logps import keys, models

    with as_reference(trainer):
        return keys.model_digest(models.base_of(reference_of(trainer)))


def precision_of(trainer: Any) -> str:
    return f"accelerate {trainer.accelerator.mixed_precision}"


def sharing(memory: Memory) -> TrainerCallback:
    from transformers import TrainerCallback

    class Sharing(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            memory.share()

        on_evaluate = on_train_end = on_epoch_end

    return Sharing()


def _drops(base: PreTrainedModel) -> bool:
    """Whether the model without its adapters has any dropout, as a module or as an entry of its configuration."""
    entries = base.config.to_dict().items()
    if any("drop" in name and isinstance(x, float) and x > 0 for name, x in entries):
        return True
    modules = ((name, module) for name, module in base.named_modules() if isinstance(module, nn.Dropout))
    return any(module.p > 0 and "lora_dropout" not in name for name, module in modules)
