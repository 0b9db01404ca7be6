"""RewardTrainer of TRL < 0.29."""

from dataclasses import replace

from tests.contract.trainers.trl.reward import HARNESS, families

NAMES = ("qwen3", "mistral", "gemma2", "phi3", "gpt_oss", "mixtral")
HARNESSES = [replace(HARNESS, families=families(*NAMES), fallbacks={}, sabotages={})]
