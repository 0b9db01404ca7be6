"""`precompute_ref_log_probs=True` of TRL's DPOTrainer by `fastdpo.ref_logps`.

The trainer's own collator makes the batches and its own `compute_ref_log_probs` runs them, so
devices, adapters, autocast and LD-DPO behave as in TRL. Different from TRL, batches are formed by
packed tokens with the longest pairs first, and values are stored as they are computed, under a key
of everything that they depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...data.columns import REFERENCE_COLUMNS, has_transform
from ...logs import report, warn
from ...models import forward, parts
from ...models.examine.comparable import in_evaluation_mode
from ...models.examine.support import rope_reason
from ...models.parts import rope_limit
from ...models.ranks.sharding import reshard
from ...reasons import Reason
from ..registry import DPO
from .models import as_reference, reference_logps, reference_of

if TYPE_CHECKING:
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

FOLDER = "fastdpo-ref-logps"

ENGINE = "_precompute_engine"
"""The attribute in which TRL keeps the DeepSpeed engine of a policy that is its own reference."""


RELIES_ON = ("_precompute_ref_logps", ":DataCollatorForPreference.torch_call")
"""The functions that it replaces (see `TrainerLine.options_rely_on`)."""


def is_supported(trainer: DPOTrainer, dataset: Dataset, changed: Sequence[str]) -> bool:
    """Whether `with_precomputed_logps` can replace TRL's own pass for
    this trainer. Logs why it cannot.

    `changed` are the functions that it replaces and that have other code than a tested version.
    """
    from datasets import Dataset

    patched = forward.is_installed(reference_of(trainer), DPO)
    if not patched or not isinstance(dataset, Dataset):  # TRL refuses streaming datasets
        return False
    reason = Reason("changed-code", functions=", ".join(changed)) if changed else None
    reason = reason or _unsupported_reason(trainer)  # TRL 0.29 sets a transform itself
    reason = reason or (Reason("transformed-rows") if has_transform(dataset) else _width_reason(trainer, dataset))
    if reason is not None:
        report(f"{DPO}: TRL's own pass precomputes the reference log-probabilities, {reason.named}")
    return reason is None


def _unsupported_reason(trainer: DPOTrainer) -> Reason | None:
    from trl.trainer import dpo_trainer

    collator = type(trainer.data_collator)
    if collator is not dpo_trainer.DataCollatorForPreference:
        return Reason("own-collator", collator=collator.__name__)
    if not hasattr(trainer.data_collator, "max_length"):
        return Reason("late-truncation")
    if type(trainer).compute_ref_log_probs is not dpo_trainer.DPOTrainer.compute_ref_log_probs:
        return Reason("own-reference", trainer=type(trainer).__name__)
    if _needs_engine(trainer) and not hasattr(trainer, ENGINE):
        return Reason("deepspeed-precompute")
    if trainer.accelerator.parallelism_config is not None:
        return Reason("parallel-precompute")
    return None


def _width_reason(trainer: DPOTrainer, dataset: Dataset) -> Reason | None:
    """Why values depend on the batches that they are computed in, which TRL forms in the order of the
    dataset, or None.
    """
    from ...ref_logps import pairs

    base = parts.base_of(reference_of(trainer), "precompute_ref_log_probs")
    if rope_limit(base) is None or set(REFERENCE_COLUMNS) <= set(dataset.column_names):
        return None
    collator = cast("DataCollatorForPreference", trainer.data_collator)
    rows = pairs.Pairs(dataset, collator.max_length, collator.truncation_mode)
    multiple = collator.pad_to_multiple_of or 1
    widest = -(-int(rows.lengths.longest.max(initial=0)) // multiple) * multiple
    return rope_reason(base, widest)


def with_precomputed_logps(trainer: DPOTrainer, dataset: Dataset, name: str, batch_size: int) -> Dataset:
    """Returns the dataset with its reference log-probabilities, as
    `DPOTrainer._precompute_ref_logps` does.
    """
    from accelerate.utils import send_to_device
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from ...ref_logps import filling, keys, pairs, with_ref_logps

    if set(REFERENCE_COLUMNS) <= set(dataset.column_names):
        warn(f"{DPO}: the {name} dataset has {' and '.join(REFERENCE_COLUMNS)}, which are used as they are")
        return dataset

    model = reference_of(trainer)
    accelerator = trainer.accelerator
    collator = cast(DataCollatorForPreference, trainer.data_collator)
    vocabulary = parts.vocabulary_of(parts.base_of(model, "precompute_ref_log_probs"))
    rows = pairs.Pairs(dataset, collator.max_length, collator.truncation_mode, vocabulary)
    # A model that runs padded is given as many pairs as TRL would give it.
    with in_evaluation_mode(model):
        is_fused = forward.will_be_fused(model, in_doubt=True)
    most = cast("DPOConfig", trainer.args).precompute_ref_batch_size if is_fused else batch_size
    bounds = (filling.TOKENS_PER_BATCH, most)
    directory = _cache_directory(dataset)
    precision = f"accelerate {accelerator.mixed_precision}"
    if _needs_engine(trainer):  # which casts the weights where others use autocast
        precision += ", DeepSpeed"
    reshard(model)
    with as_reference(trainer):
        stored = keys.shards_of(directory, model, rows, precision, trainer.ld_alpha, bounds)

    def score(examples):
        batch = send_to_device(collator(examples), accelerator.device)
        return reference_logps(trainer, batch, _engine(trainer))

    with in_evaluation_mode(model):
        logps = filling.run(
            score, rows, stored, bounds, accelerator.device, f"Computing reference log probs for {name} dataset"
        )
    if getattr(trainer, ENGINE, None) is not None:
        _complete_trace(getattr(trainer, ENGINE))
        forward.examine_again(model, DPO)  # the training's engine adds hooks of its own
    return with_ref_logps(dataset, logps)


def _needs_engine(trainer: DPOTrainer) -> bool:
    """Whether the reference is the policy, which DeepSpeed has not prepared before the training."""
    return trainer.is_deepspeed_enabled and trainer.ref_model is None


def _engine(trainer: DPOTrainer) -> nn.Module:
    """The module that runs the reference, as in `DPOTrainer._precompute_ref_logps`."""
    model = reference_of(trainer)
    if not _needs_engine(trainer):
        return model
    from trl.models.utils import prepare_deepspeed

    if getattr(trainer, ENGINE) is None:
        setattr(trainer, ENGINE, prepare_deepspeed(model, trainer.accelerator))
    return getattr(trainer, ENGINE)


def _complete_trace(engine: Any) -> None:
    """Completes the trace of modules that ZeRO-3 records in an engine's first forward pass.

    It would do so in the next one, which fails after a pass of a single batch: the training's engine
    has then given the same modules other ids.
    """
    if engine.zero_optimization_partition_weights():
        engine.optimizer.get_param_coordinator().reset_step()


def _cache_directory(dataset: Dataset) -> Path | None:
    """The directory of the dataset's files, or for a dataset in memory
    the cache directory of `datasets`.
    """
    from datasets import config, is_caching_enabled

    if not is_caching_enabled():
        return None
    files = dataset.cache_files
    home = Path(files[0]["filename"]).parent if files else Path(config.HF_DATASETS_CACHE)
    return home / FOLDER
