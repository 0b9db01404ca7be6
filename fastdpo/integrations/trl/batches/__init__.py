"""What a step of DPOTrainer in TRL trains on: batches by a budget of tokens, and pairs of one prompt together."""
