"""`precompute_ref_log_probs=True` of TRL's DPOTrainer, done by `fastdpo.ref_logps`.

The trainer's own collator makes the batches and its own `compute_ref_log_probs` runs them: devices, adapters, autocast
and LD-DPO are its own. What is different: longest pairs first, packed tokens counted; every value stored as it is
computed, under a key of all that it depends on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import nn

from .fused_forward import NotFused, is_fused, is_wrapped, logger, strict
from .trl_dpo import NAME

if TYPE_CHECKING:
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

FOLDER = "fastdpo-ref-logps"


def is_ours(trainer: DPOTrainer, dataset: Dataset) -> bool:
    """Whether a trainer's values are computed here. If not for a reason of its own, that is logged."""
    from datasets import Dataset

    built_patched = is_wrapped(reference_of(trainer), NAME)
    if not built_patched or not isinstance(dataset, Dataset):  # streaming data are refused by TRL
        return False
    reason = _why_not(trainer)
    if reason is not None:
        text = f"{NAME}: reference log-probabilities are precomputed by TRL's own pass, {reason}"
        if strict():
            raise NotFused(f"{text} (FASTDPO_STRICT=1)")
        logger.warning("%s", text)
    return reason is None


def _why_not(trainer: DPOTrainer) -> str | None:
    from trl.trainer import dpo_trainer

    collator = type(trainer.data_collator)
    if collator is not dpo_trainer.DataCollatorForPreference:
        return f"{collator.__name__} may make other tokens than the data set's"
    if type(trainer).compute_ref_log_probs is not dpo_trainer.DPOTrainer.compute_ref_log_probs:
        return f"{type(trainer).__name__} has a compute_ref_log_probs of its own"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed's engine is not supported here yet"
    if trainer.accelerator.parallelism_config is not None:
        return "ranks that share a batch (parallelism_config) are not supported here yet"
    return None


def precompute(trainer: DPOTrainer, dataset: Dataset, name: str, batch_size: int) -> Dataset:
    """The data set with its reference log-probabilities, as `DPOTrainer._precompute_ref_logps` returns it."""
    from accelerate.utils import send_to_device
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from ..ref_logps import keys, models, pairs, passes, shards, with_ref_logps

    given = [column for column in ("ref_chosen_logps", "ref_rejected_logps") if column in dataset.column_names]
    if len(given) == 2:
        logger.warning("%s: %s of the %s dataset are used as they are", NAME, " and ".join(given), name)
        return dataset

    model = reference_of(trainer)
    accelerator = trainer.accelerator
    collator = cast(DataCollatorForPreference, trainer.data_collator)
    vocabulary = models.vocabulary_of(models.base_of(model))
    rows = pairs.Pairs(dataset, collator.max_length, collator.truncation_mode, vocabulary)
    # Padded, the model is given as many pairs as TRL would give it.
    bounds = passes.Bounds(
        pairs=cast("DPOConfig", trainer.args).precompute_ref_batch_size if is_fused(model) else batch_size
    )
    directory = _cache_directory(dataset)
    passes.same_everywhere(rows.digest, bounds, directory is None)
    digest = None if directory is None else _model_digest(trainer)
    stored = None
    if directory is not None and digest is not None:
        key = keys.key(rows, digest, f"accelerate {accelerator.mixed_precision}", trainer.ld_alpha)
        passes.same_everywhere(key)
        stored = shards.Shards(directory / key, key, len(rows))

    def score(examples):
        batch = send_to_device(collator(examples), accelerator.device)
        return trainer.compute_ref_log_probs(model, batch)

    with models.evaluating(model):
        logps = passes.run(
            score,
            rows,
            stored,
            bounds,
            accelerator.device,
            f"Computing reference log probs for {name} dataset",
        )
    return with_ref_logps(dataset, logps)


def reference_of(trainer: DPOTrainer) -> nn.Module:
    """Its own model, or the policy's, see `as_reference`."""
    return cast(nn.Module, trainer.ref_model or trainer.model)


def as_reference(trainer: DPOTrainer) -> AbstractContextManager[None]:
    """While it lasts a policy with adapters is its own reference: they are off, or the copy named "ref" is on."""
    from ..ref_logps import models

    adapters = _adapters(trainer)
    if adapters is None:
        return nullcontext()
    return models.with_adapter(reference_of(trainer), "ref" if "ref" in adapters else None)


def _adapters(trainer: DPOTrainer) -> dict | None:
    """Of a policy that is its own reference."""
    unwrapped = trainer.accelerator.unwrap_model(reference_of(trainer))
    return getattr(unwrapped, "peft_config", None) if trainer.ref_model is None else None


def _model_digest(trainer: DPOTrainer) -> str | None:
    """Hash of the reference, without the policy's adapter. None, with a logged reason, if it can't be cached."""
    from ..ref_logps import keys, models, passes

    model = reference_of(trainer)
    digest, reason = None, None
    with as_reference(trainer):
        if passes.off_anywhere(keys.uncacheable(model)):
            return None
        try:
            digest = keys.model_digest(models.base_of(model))
        except NotImplementedError as error:
            reason = str(error)
    return None if passes.off_anywhere(reason) else digest


def _cache_directory(dataset: Dataset) -> Path | None:
    """Beside the data; for data in memory, which has no place that all ranks know, among those of `datasets`."""
    from datasets import config, is_caching_enabled

    if not is_caching_enabled():
        return None
    files = dataset.cache_files
    home = Path(files[0]["filename"]).parent if files else Path(config.HF_DATASETS_CACHE)
    return home / FOLDER
