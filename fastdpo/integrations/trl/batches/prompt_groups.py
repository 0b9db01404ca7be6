"""`patch(group_prompts=True)` for TRL's DPOTrainer: the pairs of a prompt come into one batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from ....data.pairs import COLUMNS
from ...bypass import STATE

if TYPE_CHECKING:
    import numpy as np


def group_prompts(trainer: Any, whole_steps: bool) -> None:
    """Reorders the epochs of a trainer.

    Args:
        trainer: the trainer.
        whole_steps: whether a step of all ranks is one batch, which a budget of tokens cuts.
    """
    from accelerate.data_loader import BatchSamplerShard

    from ....lengths import number_prompts

    stock = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        loader = stock()
        if vars(trainer).get(STATE) is None:  # unpatched since
            return loader
        require_supported("group_prompts", unsupported_loader_reason(trainer, loader))
        ranks = trainer.accelerator.num_processes
        batches = loader.batch_sampler
        splits = False
        if isinstance(batches, BatchSamplerShard):
            splits, batches = batches.split_batches, batches.batch_sampler
        size = batches.batch_size // ranks if splits else batches.batch_size
        if whole_steps:
            size *= ranks * trainer.args.gradient_accumulation_steps
        batches.sampler = GroupedSampler(batches.sampler, number_prompts(loader.dataset, op="patch"), size)
        return loader

    trainer.get_train_dataloader = get_train_dataloader


class GroupedSampler(Sampler[int]):
    """The pairs that another sampler draws, in the order of `group_prompts`.

    Attributes:
        stock: the other sampler.
    """

    def __init__(self, stock: Any, prompts: np.ndarray, size: int):
        self.stock, self._prompts, self._size = stock, prompts, size

    def __len__(self) -> int:
        return len(self.stock)

    def __iter__(self) -> Iterator[int]:
        from ....batching import group_prompts

        return iter(group_prompts(list(self.stock), self._prompts, self._size).tolist())

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.stock, "set_epoch"):
            self.stock.set_epoch(epoch)


def require_supported(option: str, reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason why an option of `patch` is not supported."""
    if reason is not None:
        raise NotImplementedError(f"patch: {option} does not support {reason}")


def unsupported_loader_reason(trainer: Any, loader: Any, rewards: bool = False) -> str | None:
    """Why the pairs that a training data loader draws, for a reward model or not, cannot be known or batched
    otherwise, or None.
    """
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
    if not (rewards or hasattr(trainer, "aux_loss_enabled")):
        return "TRL before 1.8"
    columns = COLUMNS[1:] if rewards else COLUMNS
    if not set(columns) <= set(getattr(loader.dataset, "column_names", ())):
        return f"datasets without the columns {', '.join(columns)}, such as those with images"
    return None
