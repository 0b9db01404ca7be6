"""What padding, stored prompts and packing cost in the batches of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm

from ..lengths import PairLengths
from .planning import StepPlanner


@dataclass(frozen=True)
class BudgetReport:
    """Tokens and micro-batches of optimizer steps, as means over the steps. Tokens are those of all
    ranks.

    Attributes:
        steps: number of steps.
        pairs: pairs of a step.
        max_tokens: the budget.
        ranks: number of ranks.
        padded: tokens of batches of fixed numbers of pairs, padded to their longest rows.
        packed: tokens without padding, with the prompt in both rows of a pair.
        shared: tokens that are computed.
        fixed: batches of a step on a rank, with fixed numbers of pairs.
        by_budget: micro-batches of a step on a rank.
        most: micro-batches of the step that has most.
        slowest: cost of the rank that has most in a step, relative to the mean of the ranks.
    """

    steps: int
    pairs: float
    max_tokens: int
    ranks: int
    padded: float
    packed: float
    shared: float
    fixed: float
    by_budget: float
    most: int
    slowest: float

    @property
    def filled(self) -> float:
        """The part of the budget of all micro-batches that is used, from 0 to 1."""
        return self.shared / (self.by_budget * self.ranks * self.max_tokens)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"tokens a step, mean of {self.steps:,} steps of {self.pairs:,.4g} pairs:",
                f"  padded  {self.padded:12,.0f}",
                f"  packed  {self.packed:12,.0f}  {1 - self.packed / self.padded:.0%} less: no padding",
                f"  shared  {self.shared:12,.0f}  {1 - self.shared / self.padded:.0%} less: each prompt once",
                f"batches a step and rank: {self.fixed:.3g} of fixed numbers of pairs, {self.by_budget:.3g} by budget "
                f"(at most {self.most}), {self.filled:.0%} full",
                f"slowest rank: {self.slowest - 1:.1%} above the mean of {self.ranks}",
            ]
        )


def budget_report(
    lengths: PairLengths,
    planner: StepPlanner,
    steps: Sequence[Sequence[Sequence[int]]],
    *,
    progress: bool = False,
) -> BudgetReport:
    """Compares batches by a budget of tokens with batches of fixed numbers of pairs.

    Args:
        lengths: of the pairs of the dataset.
        planner: cuts the steps.
        steps: for each optimizer step, the batches of all ranks as a trainer draws them.
        progress: show a progress bar.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("budget_report: steps must not be empty; got none")
    unshared, longest = lengths.chosen + lengths.rejected, lengths.longest
    rows, most = [], 0
    for batches in tqdm(steps, desc="Scanning steps", unit=" steps", disable=not progress):
        pairs = np.concatenate([np.asarray(batch, np.int64) for batch in batches])
        cut = planner.cut(pairs)
        of_ranks = np.array([[planner.cost_of(pairs) for pairs in of_ranks] for of_ranks in cut]).sum(0)
        padded = sum(2 * len(batch) * int(longest[np.asarray(batch, np.int64)].max()) for batch in batches)
        shared = sum(planner.tokens_of(pairs) for of_ranks in cut for pairs in of_ranks)
        tokens = padded, unshared[pairs].sum(), shared
        rows.append((len(pairs), *tokens, len(batches) / planner.ranks, len(cut), of_ranks.max() / of_ranks.mean()))
        most = max(most, len(cut))
    names = ("pairs", "padded", "packed", "shared", "fixed", "by_budget", "slowest")
    means = dict(zip(names, np.array(rows, np.float64).mean(0).tolist(), strict=True))
    return BudgetReport(steps=len(steps), max_tokens=planner.max_tokens, ranks=planner.ranks, most=most, **means)
