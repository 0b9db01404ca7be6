"""OpenRLHF: `DPOTrainer`."""
