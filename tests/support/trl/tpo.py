"""Tiny TPO trainings in TRL, recorded step by step."""

from __future__ import annotations

from trl.experimental.tpo import TPOConfig, TPOTrainer

from tests.support.trl.dpo import Recipe, pairs


def triples(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Ragged pairs, each with the answer of another one as its reference."""
    rows = pairs(n, seed)
    return [{**row, "reference": rows[i - 1]["chosen"]} for i, row in enumerate(rows)]


TPO = Recipe(TPOTrainer, TPOConfig, triples, has_reference=False)
train_tpo = TPO.train
