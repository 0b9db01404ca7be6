"""LLaMA-Factory: `CustomDPOTrainer`, `CustomKTOTrainer` and `PairwiseTrainer`."""
