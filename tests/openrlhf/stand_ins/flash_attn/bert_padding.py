"""Removes the padding of a batch, and restores it."""

import torch.nn.functional as F
from einops import rearrange

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def index_first_axis(x, indices):
    return x[indices]


def unpad_input(x, attention_mask):
    """x [B, L, ...] -> x [T, ...], indices [T], cu_seqlens [B + 1], max_seqlen, lengths [B]"""
    lengths = attention_mask.sum(1)
    indices = attention_mask.flatten().nonzero().flatten()
    return x.flatten(0, 1)[indices], indices, F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max()), lengths


def pad_input(x, indices, batch, seqlen):
    """x [T, ...] -> [B, L, ...]"""
    padded = x.new_zeros(batch * seqlen, *x.shape[1:]).index_copy(0, indices, x)
    return padded.view(batch, seqlen, *x.shape[1:])
