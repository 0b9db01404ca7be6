"""TRL: `DPOTrainer` since its rewrite and before it, `OnlineDPOTrainer` and `KTOTrainer`."""
