"""The data loaders of trainers of transformers, whose batches `max_tokens` cuts otherwise."""

from __future__ import annotations

from typing import Any

DRAWS = (
    *("transformers.trainer:Trainer.get_train_dataloader", "transformers.trainer:Trainer._get_dataloader"),
    *("transformers.trainer:Trainer._get_train_sampler", "accelerate.data_loader:SeedableRandomSampler.__iter__"),
    *(f"accelerate.data_loader:BatchSamplerShard.{name}" for name in ("_iter_with_no_split", "_iter_with_split")),
    "accelerate.data_loader:DataLoaderShard.set_epoch",
)
"""The functions that draw pairs and deal them to the ranks (see `TrainerLine.relies_on`)."""


def batches_of_all_ranks(batches: Any) -> Any:
    """The batch sampler whose batches are dealt to the ranks, of that of a prepared loader."""
    from accelerate.data_loader import BatchSamplerShard

    return batches.batch_sampler if isinstance(batches, BatchSamplerShard) else batches


def require_supported(option: str, reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason why an option of `patch` is not supported."""
    if reason is not None:
        raise NotImplementedError(f"patch: {option} does not support {reason}")


def unsupported_loader_reason(trainer: Any, loader: Any) -> str | None:
    """Why the pairs that a training data loader draws cannot be known or batched otherwise, or None."""
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return "streaming datasets, whose lengths are not known before training"
    if isinstance(loader, DataLoaderDispatcher):
        return "dispatch_batches=True, which splits each batch into equal numbers of rows"
    if not isinstance(loader, DataLoaderShard):
        return f"the data loader of {type(trainer).__name__}.get_train_dataloader, which accelerate has not prepared"
    if getattr(trainer.args, "train_sampling_strategy", None) == "batch_rebalance":
        return "train_sampling_strategy='batch_rebalance', which balances batches by itself"
    return None
