"""Tiny CPO and ORPO trainings in TRL, recorded step by step."""

from __future__ import annotations

from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.support.trl.dpo import Recipe, pairs

CPO = Recipe(CPOTrainer, CPOConfig, pairs, has_reference=False)
ORPO = Recipe(ORPOTrainer, ORPOConfig, pairs, has_reference=False)
train_cpo, train_orpo = CPO.train, ORPO.train
