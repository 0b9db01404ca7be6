"""The batches of a preference dataset, and how many tokens they have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...batching import Kinship, StepPlanner
from ...lengths import PairLengths
from ...packing import IGNORE_INDEX

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.reward_config import RewardConfig

LAYOUTS = ("padded", "packed", "shared")
SEED = 42
PADDING = 0
"""The id of padding."""

Collator = Callable[[list[Any]], "dict[str, Tensor]"]


def prepared(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: DPOConfig) -> Dataset:
    """The dataset as TRL's DPOTrainer tokenizes it, chat templates included."""
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)  # all that the function reads of it
    return cast("Dataset", DPOTrainer._prepare_dataset(trainer, dataset, tokenizer, config, "train"))


def prepared_rows(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: RewardConfig) -> Dataset:
    """The dataset as TRL's RewardTrainer tokenizes it, whose rows begin with their prompts."""
    from trl.trainer.reward_trainer import RewardTrainer

    prepare: Any = RewardTrainer._prepare_dataset
    return prepare(SimpleNamespace(), dataset, tokenizer, config, "train")


class Batches:
    """Batches of a dataset by their sizes.

    Args:
        dataset: see `prepared` and `prepared_rows`.
        lengths: of its pairs.
        collator: of TRL, which pads its rows.
        store_all: see `PairLengths.packed`.
    """

    def __init__(self, dataset: Dataset, lengths: PairLengths, collator: Collator, store_all: bool = False) -> None:
        self._dataset, self._lengths, self._collator = dataset, lengths, collator
        packed = {share: lengths.packed(share=share, store_all=store_all) for share in (False, True)}
        self._sizes = {"padded": lengths.longest, "packed": packed[False], "shared": packed[True]}

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self._lengths)

    def tokens(self, layout: str, pairs: np.ndarray) -> np.ndarray:
        """Tokens of batches in one of `LAYOUTS`, from the indices of their pairs [..., B]."""
        sizes = self._sizes[layout][pairs]
        return 2 * sizes.shape[-1] * sizes.max(-1) if layout == "padded" else sizes.sum(-1)

    def largest(self, layout: str, n: int) -> np.ndarray:
        """The n largest pairs. No batch of n pairs has more tokens."""
        return np.argsort(-self._sizes[layout], kind="stable")[:n]

    def median(self, layout: str, n: int) -> np.ndarray:
        """The batch of a shuffled epoch that has the median number of tokens."""
        order = np.random.default_rng(SEED).permutation(len(self))
        epoch = order[: len(self) // n * n].reshape(-1, n)
        return epoch[np.argsort(self.tokens(layout, epoch), kind="stable")[len(epoch) // 2]]

    def epoch(self, kinship: Kinship, n: int) -> dict[str, int]:
        """Tokens of a shuffled epoch in batches of n pairs, by what is shared: as in `LAYOUTS`, and further between
        the pairs of a batch, as it is "drawn" or "grouped" by `group_prompts`, and of the whole epoch, in one "tree".
        """
        drawn = np.random.default_rng(SEED).permutation(len(self))
        alone = self._lengths.packed()
        planner = StepPlanner(self._lengths, max(int(alone.sum()), 1), kinship=kinship)

        def tokens(order: np.ndarray, size: int) -> int:
            parts = [order[start : start + size] for start in range(0, len(order), size)]
            saved = sum(int(alone[part].sum()) - planner.tokens_of(part) for part in parts)
            return int(self._sizes["shared"].sum()) - saved

        layouts = {x: sum(int(self.tokens(x, drawn[i : i + n])) for i in range(0, len(self), n)) for x in LAYOUTS}
        grouped = kinship.grouped(drawn, n)
        return layouts | {"drawn": tokens(drawn, n), "grouped": tokens(grouped, n), "tree": tokens(drawn, len(self))}

    def collate(self, pairs: np.ndarray) -> dict[str, Tensor]:
        """The arguments of a model call with a batch."""
        batch = self._collator([self._dataset[int(i)] for i in pairs])
        completions = batch.pop("completion_mask", None)
        if completions is not None:
            batch["labels"] = batch["input_ids"].masked_fill(completions == 0, IGNORE_INDEX)
        return batch
