"""DPO of a GPT of custom layers, on packed pairs: the rows of a layout travel through the layers as an argument.

    python examples/custom_layers.py

The pairs are random. In a library whose layers take other arguments, the rows travel in one of them, such as the mask
of torchtune's decoder.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastdpo import ops


def rotated(x: Tensor, position_ids: Tensor) -> Tensor:
    """x [1, T, heads, head size], turned by positions [1, T]."""
    frequencies = 1e4 ** -torch.linspace(0, 1, x.shape[-1] // 2, device=x.device)
    angles = (position_ids[..., None] * frequencies)[:, :, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Block(nn.Module):
    def __init__(self, size: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if rows is None:  # one ordinary row
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout).transpose(1, 2)
        if dropout:
            raise NotImplementedError("packed attention has no dropout: set it to 0")
        return ops.packed_attention(q[0], k[0], v[0], rows)[None]

    def forward(self, x: Tensor, position_ids: Tensor, rows: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = rotated(q, position_ids), rotated(k, position_ids)
        x = x + self.out(self.attention(q, k, v, rows).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(
        self,
        vocabulary: int = 64,
        size: int = 32,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        use_reentrant: bool = False,
    ):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, size), nn.Linear(size, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(size, heads, dropout) for _ in range(layers))
        self.use_reentrant = use_reentrant

    def forward(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor | None) -> Tensor:
        """Hidden states [1, T, D]. Checkpointing of both kinds keeps arguments: an attribute that is set around the
        forward would be gone when it runs a layer again in the backward.
        """
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, position_ids, rows, use_reentrant=self.use_reentrant)
        return x


def logps_of(model: GPT, layout: ops.Layout, input_ids: Tensor) -> Tensor:
    """Summed log-probabilities of the rows [2B], chosen ones first."""
    hidden = model(layout.pack(input_ids), layout.position_ids[None], layout.rows)[0]
    results = ops.linear_logps(hidden[layout.label_index], model.head.weight, layout.labels)
    return layout.unpack(results.logps).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    policy = GPT()
    prompts, answers = torch.randint(1, 64, (4, 12)), torch.randint(1, 64, (8, 5))
    input_ids = torch.cat([prompts.repeat(2, 1), answers], 1)  # chosen rows, then rejected rows
    labels = input_ids.clone()
    labels[:, : prompts.shape[1]] = -100
    layout = ops.pack_pairs(input_ids, torch.ones_like(input_ids), labels)
    with torch.no_grad():
        references = logps_of(policy, layout, input_ids).chunk(2)  # before training, policy and reference are equal
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for _ in range(steps):
        result = ops.preference_loss(*logps_of(policy, layout, input_ids).chunk(2), *references)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
    print(f"loss {result.loss.item():.4f}; {layout.position_ids.numel()} tokens of {input_ids.numel()} positions")


if __name__ == "__main__":
    main()
