"""`fastdpo estimate`: tokens and memory of a training of DPO or of a reward model in TRL, before it runs."""
