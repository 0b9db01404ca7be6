"""Tiny KTO trainings in TRL, recorded step by step."""

from __future__ import annotations

import functools

from trl import KTOConfig, KTOTrainer

from tests.support.trl import sft
from tests.support.trl.dpo import Recipe, train_both


def rows(n: int, seed: int = 0) -> list[dict]:
    """Ragged completions with labels. Neighbours often have the same prompt.

    All completions of rows 4 to 7 are desirable, and all of rows 8 to 11 undesirable.
    """
    return [{**row, "label": {1: True, 2: False}.get(i // 4, i % 2 == 0)} for i, row in enumerate(sft.rows(n, seed))]


KTO = Recipe(KTOTrainer, KTOConfig, rows)
config, train_kto = KTO.config, KTO.train
train_both_kto = functools.partial(train_both, trainer="trl.KTOTrainer", train=train_kto)
"""`trl.dpo.train_both` for KTO."""
