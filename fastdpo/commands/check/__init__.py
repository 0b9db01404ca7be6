"""`fastdpo check`: runs a model on preference pairs in TRL's DPOTrainer, stock and patched, and compares.

`side.py` is one run, in a process of its own; `command.py` starts the runs one after the other, and
`verdicts.py` compares what they have written.
"""
