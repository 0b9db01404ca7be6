"""Tiny SFT trainings in TRL, recorded step by step."""

from __future__ import annotations

import functools

from trl import SFTConfig, SFTTrainer

from tests.support.trl.dpo import Recipe, pairs, train_both


def rows(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Ragged prompts and completions. Some neighbours have the same prompt."""
    both = [
        {"prompt": pair["prompt"], "completion": pair[name]}
        for pair in pairs((n + 1) // 2, seed)
        for name in ("chosen", "rejected")
    ]
    return both[:n]


SFT = Recipe(SFTTrainer, SFTConfig, rows, has_reference=False)
config, train_sft = SFT.config, SFT.train
train_both_sft = functools.partial(train_both, reference=False, trainer="trl.SFTTrainer", train=train_sft)
"""`trl.dpo.train_both` for SFT."""
