"""TRL: `DPOTrainer` since its rewrite and before it, and `OnlineDPOTrainer`."""
