"""`fastdpo estimate`: tokens and memory of a DPO training in TRL, with and without fastdpo, before it runs."""
