"""The reference memory of TRL's DPOTrainer: what the reference gave a pair is remembered by the pair's content.

A trainer that precomputes reference log-probabilities takes them from its batches. The memory uses that way in: it adds
them to each batch, those of pairs that it has not seen from the trainer's own `compute_ref_log_probs`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from .fused_forward import calls, say_off
from .trl_dpo import NAME
from .trl_dpo_precompute import as_reference, reference_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback
    from trl.trainer.dpo_trainer import DPOTrainer

TAKEN = {"input_ids", "attention_mask", "completion_mask"}
DTYPES = {"high": "I64", "low": "I64", "chosen": "F64", "rejected": "F64"}
"""Of files: the two halves of a pair's hash, and its log-probabilities in nats."""


class ReferenceMemory:
    """Of one trainer.

    Ranks remember for themselves, and tell each other at the end of an epoch and after an evaluation.

    Args:
        option: False: nothing is remembered. True: for as long as the trainer lives. A directory: beyond that.
    """

    def __init__(self, option: bool | Path):
        self._on, self._directory = option is not False, option if isinstance(option, Path) else None
        self._begun = False
        self._key = ""
        self._values: dict[bytes, tuple[float, float]] = {}
        self._new: dict[bytes, tuple[float, float]] = {}

    @contextmanager
    def serving(self, trainer: DPOTrainer, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The batch with its reference log-probabilities, and a trainer that takes them from it while the block lasts.

        The batch as it came where the memory is off.
        """
        if self._on and not self._begun:
            self._begin(trainer)
        if self._on and not {name for name, x in inputs.items() if x is not None} <= TAKEN:
            self._turn_off(f"batches hold {', '.join(sorted(inputs.keys() - TAKEN))} too")
        if not self._on:
            yield inputs
            return
        chosen, rejected = self._log_probs(trainer, inputs)
        trainer.precompute_ref_logps = True
        try:
            yield {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        finally:
            trainer.precompute_ref_logps = False

    def share(self) -> None:
        """Tells the other ranks what is new, and writes it to the directory. Every rank must call this."""
        from ..ref_logps.passes import of_all_ranks

        for new in of_all_ranks(self._new):
            self._values |= new
        if self._directory is not None and self._new:
            _write(self._directory / self._key, self._key, self._new)
        self._new = {}

    def _begin(self, trainer: DPOTrainer) -> None:
        self._begun = True
        if trainer.precompute_ref_logps:  # nothing is left to remember
            self._on = False
            return
        reason = _why_not(trainer)
        if reason is not None:
            self._turn_off(reason)
            return
        if self._directory is not None:
            self._key = _key(trainer)
            self._values = _read(self._directory / self._key, self._key)
        trainer.add_callback(_sharing(self))

    def _turn_off(self, reason: str) -> None:
        self._on = False
        say_off(f"{NAME}: reference_memory is off, {reason}")

    def _log_probs(self, trainer: DPOTrainer, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Chosen and rejected, [B] each."""
        digests = digests_of_pairs(inputs)
        missing = [i for i, digest in enumerate(digests) if digest not in self._values]
        found: dict[bytes, tuple[float, float]] = {}
        if missing:
            device, n_pairs = inputs["input_ids"].device, len(digests)
            rows = torch.tensor([*missing, *(i + n_pairs for i in missing)], device=device)
            part = inputs if len(missing) == n_pairs else {name: inputs[name][rows] for name in TAKEN}
            computed = trainer.compute_ref_log_probs(reference_of(trainer), part)
            values = torch.stack(list(computed), 1).double().tolist()
            found = {digests[i]: (chosen, rejected) for i, (chosen, rejected) in zip(missing, values, strict=True)}
            finite = {digest: pair for digest, pair in found.items() if all(map(math.isfinite, pair))}
            self._values |= finite
            self._new |= finite
        else:
            calls[NAME, "reference", "remembered"] += 1
        pairs = [found.get(digest) or self._values[digest] for digest in digests]
        wide = torch.promote_types(next(reference_of(trainer).parameters()).dtype, torch.float32)
        chosen, rejected = torch.tensor(pairs, dtype=wide, device=inputs["input_ids"].device).unbind(1)
        return chosen, rejected


def digests_of_pairs(inputs: dict[str, Tensor]) -> list[bytes]:
    """16 bytes for each pair of a batch: its real tokens and which of them are scored. One copy to the host."""
    stacked = torch.stack([inputs[name].long() for name in ("input_ids", "attention_mask", "completion_mask")])
    ids, real, scored = stacked.cpu().numpy()
    n_pairs = len(ids) // 2
    found = []
    for pair in range(n_pairs):
        digest = hashlib.blake2b(digest_size=16)
        for row in (pair, pair + n_pairs):
            kept = real[row] != 0
            digest.update(kept.sum().tobytes() + ids[row][kept].tobytes() + (scored[row][kept] != 0).tobytes())
        found.append(digest.digest())
    return found


def _why_not(trainer: DPOTrainer) -> str | None:
    from trl.trainer import dpo_trainer

    from ..ref_logps import keys, models

    args = cast(Any, trainer.args)
    if args.sync_ref_model:
        return "the reference follows the policy (sync_ref_model)"
    if type(trainer).compute_ref_log_probs is not dpo_trainer.DPOTrainer.compute_ref_log_probs:
        return f"{type(trainer).__name__} has a compute_ref_log_probs of its own"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.accelerator.parallelism_config is not None:
        return "ranks run the reference together, and could disagree on leaving it out"
    if trainer.ref_model is None:  # it is the policy without its adapter, in the policy's mode
        if args.neftune_noise_alpha:
            return "NEFTune's noise reaches the reference"
        base = models.base_of(cast(nn.Module, trainer.model))
        if _drops(base):
            return "dropout is active in the reference"
        trained = {id(x) for x in base.parameters() if x.requires_grad}
        with as_reference(trainer):
            if any(id(x) in trained for x in keys.active_parameters(base)):
                return "weights that the reference has are trained"
    return None


def _drops(base: PreTrainedModel) -> bool:
    """Whether the model without its adapters has any dropout, as a module or as an entry of its configuration."""
    entries = base.config.to_dict().items()
    if any("drop" in name and isinstance(x, float) and x > 0 for name, x in entries):
        return True
    modules = ((name, module) for name, module in base.named_modules() if isinstance(module, nn.Dropout))
    return any(module.p > 0 and "lora_dropout" not in name for name, module in modules)


def _key(trainer: DPOTrainer) -> str:
    """Of all that a pair's log-probabilities depend on beside its tokens."""
    from ..ref_logps import keys, models

    with as_reference(trainer):
        model = keys.model_digest(models.base_of(reference_of(trainer)))
    parts = (keys.VERSION, "by content", model, f"accelerate {trainer.accelerator.mixed_precision}", trainer.ld_alpha)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _write(directory: Path, key: str, values: dict[bytes, tuple[float, float]]) -> None:
    from ..ref_logps import shards

    halves = torch.from_numpy(np.frombuffer(b"".join(values), dtype=np.int64).copy()).view(-1, 2)
    numbers = torch.tensor(list(values.values()), dtype=torch.float64)
    columns = (*halves.unbind(1), *numbers.unbind(1))
    shards.write_file(directory, key, {name: x.contiguous() for name, x in zip(DTYPES, columns, strict=True)})


def _read(directory: Path, key: str) -> dict[bytes, tuple[float, float]]:
    """Of all files. ValueError if one is not what `_write` has made for this key."""
    from ..ref_logps import shards

    values: dict[bytes, tuple[float, float]] = {}
    for path in shards.files(directory):
        high, low, chosen, rejected = shards.read_file(path, key, DTYPES).values()
        digests = torch.stack([high, low], 1).numpy()
        numbers = zip(chosen.tolist(), rejected.tolist(), strict=True)
        values.update((digest.tobytes(), pair) for digest, pair in zip(digests, numbers, strict=True))
    return values


def _sharing(memory: ReferenceMemory) -> TrainerCallback:
    from transformers import TrainerCallback

    class Sharing(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            memory.share()

        on_evaluate = on_train_end = on_epoch_end

    return Sharing()
