"""A stand-in for a build of flash attention from the Kernels Hub, which transformers loads and calls as it is."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import modeling_flash_attention_utils, modeling_utils
from transformers.integrations import hub_kernels

from fastdpo.ops.attention import flash
from fastdpo.ops.choice import notes

NAME = "_flash_attn2_1a2b3c.flash_attn_interface"
LOADED = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn")


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False) -> Tensor:  # [B, L, H, D]
    assert causal
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, visible, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
) -> Tensor:  # fmt: skip
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    rows = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    out = [flash_attn_func(*(x[None] for x in row), dropout_p, softmax_scale, causal)[0] for row in rows]
    return torch.cat(out)


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q):
    raise NotImplementedError


def _flash_attn_varlen_backward(dout, q, k, v, cu_seqlens_q):
    raise NotImplementedError


FUNCTIONS = flash_attn_func, flash_attn_varlen_func, _flash_attn_varlen_forward, _flash_attn_varlen_backward


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes transformers find the build on the Hub. Returns the repositories that it then asks for."""
    module, repositories = ModuleType(NAME), []
    for function in FUNCTIONS:
        copied = FunctionType(function.__code__, globals(), function.__name__, function.__defaults__)
        copied.__module__ = NAME
        setattr(module, function.__name__, copied)

    def get_kernel(repository, **options):
        repositories.append(repository)
        return module

    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    for users in (hub_kernels, modeling_utils):
        monkeypatch.setattr(users, "is_kernels_available", lambda: True)
    for name in LOADED:
        monkeypatch.setattr(modeling_flash_attention_utils, name, None)
    monkeypatch.setattr(notes, "builds", {})
    flash.load.cache_clear()
    return repositories
