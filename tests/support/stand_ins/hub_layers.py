"""Layers as a repository of the Kernels Hub has them, in PyTorch: they stand in for kernels.

Each takes the place of the forward of a module of transformers, whose attributes it reads.
"""

import torch
from torch import nn

calls: list[str] = []
note = calls.append  # a layer that held a list of its own would keep state
"""The names of the layers that have run."""


class RMSNorm(nn.Module):
    """Like many kernels, it has no float64."""

    def forward(self, hidden_states):
        note("RMSNorm")
        if hidden_states.dtype == torch.float64:
            raise TypeError("RMSNorm: hidden_states must be float32, float16 or bfloat16; got torch.float64")
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class SwiGLUMLP(nn.Module):
    """Computes both projections in one product."""

    def forward(self, x):
        note("SwiGLUMLP")
        both = nn.functional.linear(x, torch.cat((self.gate_proj.weight, self.up_proj.weight)))
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Rotary(nn.Module):
    """For evaluation: it has no gradient."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        note("Rotary")
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        half = q.shape[-1] // 2
        q, k = (x.detach() * cos + torch.cat((-x[..., half:], x[..., :half]), -1).detach() * sin for x in (q, k))
        return q, k


class CausalConv1d(nn.Module):
    """Notes how many rows it is given."""

    def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
        note(f"CausalConv1d of {len(hidden_states)} rows")
        padded = nn.functional.pad(hidden_states, (weight.shape[-1] - 1, 0))
        return nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight))
