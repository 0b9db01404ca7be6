"""OpenRLHF: `DPOTrainer` and `RewardModelTrainer`."""
