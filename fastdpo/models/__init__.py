"""Everything that fastdpo does to one transformers model: packed attention, fused head, fused
forward.

Nothing in this package knows of a trainer.
"""
