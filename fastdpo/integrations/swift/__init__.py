"""ms-swift: `DPOTrainer`, `CPOTrainer` (CPO and SimPO), `ORPOTrainer`, `KTOTrainer` and `RewardTrainer`."""
