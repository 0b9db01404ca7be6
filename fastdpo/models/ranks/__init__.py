"""Models and batches that ranks have in common.

sharding.py         models that ranks hold parts of, and so examine together
sequence_group.py   ranks that hold the parts of each batch, and what each of them computes
splitting.py        whether a model can run such parts, and the part of this rank
"""
