"""Attention over packed tokens whose rows share prefixes.

`packed_attention` is the op, `routes` chooses what computes it on a GPU, `pieces` computes it on a CPU.
"""
