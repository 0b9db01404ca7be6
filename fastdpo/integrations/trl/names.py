"""Names under which the trainers of TRL are patched, counted and logged."""

DPO = "trl.DPOTrainer"
ONLINE_DPO = "trl.OnlineDPOTrainer"
KTO = "trl.KTOTrainer"
SFT = "trl.SFTTrainer"
GRPO = "trl.GRPOTrainer"
RLOO = "trl.RLOOTrainer"
