"""TRL: `DPOTrainer` since its rewrite and before it, `OnlineDPOTrainer`, `KTOTrainer` and others."""
