"""ms-swift: `DPOTrainer`, `CPOTrainer` (CPO and SimPO), `ORPOTrainer` and `KTOTrainer`."""
