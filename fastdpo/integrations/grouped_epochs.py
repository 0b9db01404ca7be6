"""`patch(group_prompts=...)` for trainers of transformers: pairs that begin alike come into one batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from ..data.columns import column_names
from .bypass import STATE
from .options import PatchOptions, applies

if TYPE_CHECKING:
    from ..batching import Kinship

CHOSEN_ROWS = (
    ("prompt_ids", "chosen_ids"),
    ("prompt_input_ids", "chosen_input_ids"),
    ("chosen_ids",),
    ("chosen_input_ids",),
    ("input_ids",),
)
"""The columns that hold the chosen row of a pair: TRL's, those before TRL 0.29, RewardTrainer's and LLaMA-Factory's.
The last is that of a row of SFTTrainer.
"""


RELIES_ON = (
    *("transformers.trainer:Trainer.get_train_dataloader", "transformers.trainer:Trainer._get_dataloader"),
    *("transformers.trainer:Trainer._get_train_sampler", "accelerate.data_loader:SeedableRandomSampler.__iter__"),
    *(f"accelerate.data_loader:BatchSamplerShard.{name}" for name in ("_iter_with_no_split", "_iter_with_split")),
    "accelerate.data_loader:DataLoaderShard.set_epoch",
)
"""The functions that draw pairs and deal them to the ranks (see `TrainerLine.relies_on`)."""


def install(trainer: Any, name: str, options: PatchOptions) -> None:
    """Reorders the epochs of a trainer, if an option says so.

    Args:
        trainer: it may not have been initialized.
        name: of its line.
        options: of `patch`.
    """
    if options.group_prompts and applies("group_prompts", name):
        whole_steps = options.max_tokens is not None and applies("max_tokens", name)
        make_loader = functools.partial(_train_dataloader, trainer, trainer.get_train_dataloader, options, whole_steps)
        vars(trainer)["get_train_dataloader"] = make_loader


def _train_dataloader(
    trainer: Any, stock: Callable[..., Any], options: PatchOptions, whole_steps: bool, *args: Any, **kwargs: Any
) -> Any:
    """The loader of a trainer. With `whole_steps`, a step of all ranks is one batch, which a budget of tokens cuts."""
    from ..batching import kinship_of

    loader = stock(*args, **kwargs)
    if vars(trainer).get(STATE) is None:  # unpatched since
        return loader
    require_supported("group_prompts", unsupported_loader_reason(trainer, loader))
    columns = _chosen_columns(loader.dataset)
    rule = " or ".join(", ".join(names) for names in CHOSEN_ROWS)
    require_supported("group_prompts", None if columns else f"datasets without the columns {rule}")
    batches = batches_of_all_ranks(loader.batch_sampler)
    ranks = trainer.accelerator.num_processes
    splits = getattr(loader.batch_sampler, "split_batches", False)  # of all ranks
    size = batches.batch_size // ranks if splits else batches.batch_size
    if whole_steps and (vars(trainer)[STATE].budget is None or ranks == 1):  # rows may move to other ranks
        size *= ranks * trainer.args.gradient_accumulation_steps
    window = None if options.group_prompts is True else options.group_prompts
    kinship = kinship_of(loader.dataset, columns, op="patch")
    batches.sampler = GroupedSampler(batches.sampler, kinship, size, window)
    return loader


def kinship_in(loader: Any) -> Kinship | None:
    """The kinship by which the epochs of a loader are reordered, if they are."""
    sampler = getattr(batches_of_all_ranks(loader.batch_sampler), "sampler", None)
    return sampler.kinship if isinstance(sampler, GroupedSampler) else None


def batches_of_all_ranks(batches: Any) -> Any:
    """The batch sampler whose batches are dealt to the ranks, of that of a prepared loader."""
    from accelerate.data_loader import BatchSamplerShard

    return batches.batch_sampler if isinstance(batches, BatchSamplerShard) else batches


class GroupedSampler(Sampler[int]):
    """The pairs that another sampler draws, in the order of `Kinship.grouped`.

    Attributes:
        stock: the other sampler.
        kinship: of the pairs.
    """

    def __init__(self, stock: Any, kinship: Kinship, size: int, window: int | None = None):
        self.stock, self.kinship, self._size, self._window = stock, kinship, size, window

    def __len__(self) -> int:
        return len(self.stock)

    def __iter__(self) -> Iterator[int]:
        return iter(self.kinship.grouped(list(self.stock), self._size, self._window).tolist())

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.stock, "set_epoch"):
            self.stock.set_epoch(epoch)


def _chosen_columns(dataset: Any) -> tuple[str, ...]:
    """The columns of a dataset that hold the chosen row of a pair, empty if they are not known."""
    names = column_names(dataset)
    return next((columns for columns in CHOSEN_ROWS if names.issuperset(columns)), ())


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
