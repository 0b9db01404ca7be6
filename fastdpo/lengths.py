"""The lengths of the rows of a preference dataset, and how many tokens they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

import numpy as np
from tqdm.auto import tqdm

from .data.columns import COLUMNS, read_columns, require_dataset, require_truncation

if TYPE_CHECKING:
    from datasets import Dataset


Ids = tuple[np.ndarray, np.ndarray]
"""The ids of some rows of a column, one row after the other, and the lengths of the rows."""


@dataclass(frozen=True)
class PairLengths:
    """The lengths of N pairs after truncation. Every field is int64 [N].

    Attributes:
        chosen, rejected: tokens of the prompt and its completion.
        chosen_answer, rejected_answer: tokens of the completion alone.
        common: tokens that both rows begin with, found by comparing ids.
        skipped: tokens that truncation has cut off the beginning of the chosen row.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    chosen_answer: np.ndarray
    rejected_answer: np.ndarray
    common: np.ndarray
    skipped: np.ndarray

    @classmethod
    def of(cls, columns: Sequence[Ids], max_length: int | None, truncation_mode: str) -> Self:
        """The lengths of pairs.

        Args:
            columns: the prompts, chosen and rejected answers.
            max_length, truncation_mode: as in `DPOConfig`.
        """
        prompts, *answers = columns
        wholes = [prompts[1] + sizes for _, sizes in answers]
        rows = wholes if max_length is None else [np.minimum(whole, max_length) for whole in wholes]
        if truncation_mode == "keep_start":
            kept_answers = [np.maximum(row - prompts[1], 0) for row in rows]
            skipped = [np.zeros_like(row) for row in rows]
        else:
            kept_answers = [np.minimum(sizes, row) for (_, sizes), row in zip(answers, rows, strict=True)]
            skipped = [whole - row for whole, row in zip(wholes, rows, strict=True)]
        shorter = np.minimum(*rows)
        pair = np.repeat(np.arange(len(shorter)), shorter)
        place = np.arange(len(pair)) - np.repeat(shorter.cumsum() - shorter, shorter)
        chosen_ids, rejected_ids = (
            _joined(prompts, answer)[(whole.cumsum() - whole + skip)[pair] + place]
            for answer, whole, skip in zip(answers, wholes, skipped, strict=True)
        )
        common = shorter.copy()
        differing = np.flatnonzero(chosen_ids != rejected_ids)
        np.minimum.at(common, pair[differing], place[differing])
        (chosen, rejected), (chosen_answer, rejected_answer) = rows, kept_answers
        return cls(chosen, rejected, chosen_answer, rejected_answer, common, skipped[0])

    @classmethod
    def joined(cls, parts: Sequence[PairLengths]) -> Self:
        """The lengths of the pairs of all parts, one after the other."""
        none = np.zeros(0, np.int64)
        return cls(*(np.concatenate([none, *(getattr(part, field.name) for part in parts)]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.common)

    def __getitem__(self, index: np.ndarray | slice) -> PairLengths:
        """Some of the pairs."""
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def longest(self) -> np.ndarray:
        """Tokens of the longer row, int64 [N]."""
        return np.maximum(self.chosen, self.rejected)

    def packed(self, *, share: bool = True, store_all: bool = False) -> np.ndarray:
        """Tokens that fastdpo computes, int64 [N]: the lengths of the layouts of `pack_pairs`.

        Args:
            share: store the common prefix of a pair once.
            store_all: store every token, including the last one of a row, which no scored position
                depends on. A router's auxiliary loss counts them.
        """
        chosen, rejected = self._needed(store_all)
        return chosen + rejected - (np.minimum(self.common, np.minimum(chosen, rejected)) if share else 0)

    def scored(self, *, share: bool = True) -> np.ndarray:
        """Rows of the LM head that fastdpo computes, int64 [N].

        Args:
            share: score a position that both rows share, with the same next token, once.
        """
        labels = np.sum([answer - (row == answer) * (answer > 0) for row, answer in self._rows()], axis=0)
        if not share:
            return labels
        starts = [np.maximum(row - answer - 1, 0) for row, answer in self._rows()]
        shared = np.minimum(self.common, np.minimum(*self._needed(False)))
        twice = np.minimum(shared, self.common - 1) - np.maximum(*starts)
        return labels - np.maximum(twice, 0)

    def attended(self, *, share: bool = True) -> np.ndarray:
        """Pairs of a query and a key that it sees, without windows, int64 [N].

        Args:
            share: compute the common prefix of a pair once.
        """
        chosen, rejected = self._needed(False)
        prefix = np.minimum(self.common, np.minimum(chosen, rejected)) if share else np.zeros_like(chosen)
        triangles = [n * (n + 1) // 2 for n in (chosen, rejected, prefix)]
        return triangles[0] + triangles[1] - triangles[2]

    def _rows(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        return (self.chosen, self.chosen_answer), (self.rejected, self.rejected_answer)

    def _needed(self, store_all: bool) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each row that a scored position depends on, or all of them."""
        if store_all:
            return self.chosen, self.rejected
        # The last token is a label only. Nothing scores the first token of a row.
        chosen, rejected = ((row - 1) * (np.minimum(answer, row - 1) > 0) for row, answer in self._rows())
        return chosen, rejected


class RewardLengths(PairLengths):
    """Those of pairs for a reward model, which scores the last token of each row. Prompts are a part of the rows."""

    def scored(self, *, share: bool = True) -> np.ndarray:
        return 2 - share * ((self.common == self.chosen) & (self.common == self.rejected))

    def _needed(self, store_all: bool) -> tuple[np.ndarray, np.ndarray]:
        return self.chosen, self.rejected


def pair_lengths(
    dataset: Dataset | Sequence[Mapping],
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    *,
    rewards: bool = False,
    op: str = "pair_lengths",
    progress: bool = False,
) -> PairLengths:
    """Reads the lengths and common prefixes of a dataset as TRL's DPOTrainer or RewardTrainer prepares it.

    Args:
        dataset: has the columns prompt_ids, chosen_ids and rejected_ids.
        max_length, truncation_mode: as in `DPOConfig`.
        rewards: whether the dataset is that of RewardTrainer, whose rows begin with their prompts: it has no
            column prompt_ids. Returns `RewardLengths`.
        op: the public function, for error messages.
        progress: show a progress bar.

    Raises:
        TypeError, ValueError: an argument, or a column of the dataset, is malformed.
    """
    require_truncation(op, max_length, truncation_mode)
    require_dataset(op, dataset)
    kind, parts = RewardLengths if rewards else PairLengths, []
    with tqdm(total=len(dataset), desc="Reading lengths", unit=" pairs", disable=not progress) as bar:
        for columns in read_columns(op, dataset, COLUMNS[1:] if rewards else COLUMNS):
            no_prompts = [(np.zeros(0, np.int64), np.zeros_like(columns[0][1]))] if rewards else []
            parts.append(kind.of([*no_prompts, *columns], max_length, truncation_mode))
            bar.update(len(parts[-1]))
    return kind.joined(parts)


def _joined(prompts: Ids, answers: Ids) -> np.ndarray:
    """The ids of rows: those of each prompt, followed by those of its answer."""
    parts = np.stack([prompts[1], answers[1]], 1).ravel()
    in_prompt = np.repeat(np.arange(len(parts)) % 2 == 0, parts)
    ids = np.empty(len(in_prompt), np.int64)
    ids[in_prompt], ids[~in_prompt] = prompts[0], answers[0]
    return ids
