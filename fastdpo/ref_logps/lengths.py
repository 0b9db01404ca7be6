"""The lengths of the rows of a preference dataset, and how many tokens they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

Ids = tuple[np.ndarray, np.ndarray]
"""The ids of some rows of a column, one row after the other, and the lengths of the rows."""


@dataclass(frozen=True)
class PairLengths:
    """The lengths of N pairs after truncation. Every field is int64 [N].

    Attributes:
        chosen, rejected: tokens of the prompt and its completion.
        chosen_answer, rejected_answer: tokens of the completion alone.
        common: tokens that both rows begin with, found by comparing ids.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    chosen_answer: np.ndarray
    rejected_answer: np.ndarray
    common: np.ndarray

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
        return cls(chosen, rejected, chosen_answer, rejected_answer, common)

    @classmethod
    def joined(cls, parts: Sequence[PairLengths]) -> Self:
        """The lengths of the pairs of all parts, one after the other."""
        none = np.zeros(0, np.int64)
        return cls(*(np.concatenate([none, *(getattr(part, field.name) for part in parts)]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.common)

    @property
    def longest(self) -> np.ndarray:
        """Tokens of the longer row, int64 [N]."""
        return np.maximum(self.chosen, self.rejected)

    def packed(self) -> np.ndarray:
        """Tokens that fastdpo computes, int64 [N]: the lengths of the layouts of `pack_pairs`."""
        # The last token is a label only. Nothing scores the first token of a row.
        rows = (self.chosen, self.chosen_answer), (self.rejected, self.rejected_answer)
        chosen, rejected = ((row - 1) * (np.minimum(answer, row - 1) > 0) for row, answer in rows)
        return chosen + rejected - np.minimum(self.common, np.minimum(chosen, rejected))


def _joined(prompts: Ids, answers: Ids) -> np.ndarray:
    """The ids of rows: those of each prompt, followed by those of its answer."""
    parts = np.stack([prompts[1], answers[1]], 1).ravel()
    in_prompt = np.repeat(np.arange(len(parts)) % 2 == 0, parts)
    ids = np.empty(len(in_prompt), np.int64)
    ids[in_prompt], ids[~in_prompt] = prompts[0], answers[0]
    return ids
