"""Packing a batch on the host, and attention over it against padded scaled dot-product attention."""

import pytest
import torch
import torch.nn.functional as F

from fastdpo import ops

PAIRS, PROMPT, ANSWER = 6, 256, 128
HEADS, KV_HEADS, D = 8, 2, 64


def batch(pairs: int, prompt: int, answer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs with a common prompt; rejected answers have half the length of the chosen ones."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 32_000, (2 * pairs, prompt + answer), generator=generator)
    ids[pairs:, :prompt] = ids[:pairs, :prompt]
    mask = torch.ones_like(ids)
    mask[pairs:, prompt + answer // 2 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    return ids, mask, labels


def test_pack_on_the_host(benchmark):
    ids, mask, labels = batch(64, 512, 512)
    layout = ops.pack_pairs(ids, mask, labels)
    assert len(layout.score_index) == (labels[:, 1:] != -100).sum()
    benchmark.group = "pack 64 pairs of 1k tokens"
    benchmark.pedantic(ops.pack_pairs, args=(ids, mask, labels), rounds=10, warmup_rounds=2)


@pytest.mark.parametrize("side", ["fastdpo", "padded"])
def test_attention(benchmark, side):
    ids, mask, labels = batch(PAIRS, PROMPT, ANSWER)
    layout = ops.pack_pairs(ids, mask, labels)
    generator = torch.Generator().manual_seed(1)
    tokens = len(layout.token_index)
    packed = [torch.randn(tokens, h, D, generator=generator).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)]
    rows, length = ids.shape
    where = torch.zeros(rows * length, dtype=torch.long)  # each padded token's place in the packed buffer
    where[layout.token_index] = torch.arange(tokens)
    where = where.view(rows, length)
    where[PAIRS:, :PROMPT] = where[:PAIRS, :PROMPT]
    visible = (mask[:, None, None, :] != 0) & torch.ones(length, length, dtype=torch.bool).tril()
    padded = [x.detach()[where].transpose(1, 2).contiguous().requires_grad_() for x in packed]

    def attend(side):
        if side == "fastdpo":
            out = ops.packed_attention(*packed, layout.rows)
            return out.detach(), torch.autograd.grad(out.sum(), packed)
        out = F.scaled_dot_product_attention(*padded, attn_mask=visible, enable_gqa=True)
        return out.detach(), torch.autograd.grad(out.sum(), padded)

    found = attend("fastdpo")[0]
    expected = attend("padded")[0].transpose(1, 2).reshape(rows * length, HEADS, D)[layout.token_index]
    torch.testing.assert_close(found, expected)
    benchmark.group = f"attention {PAIRS} pairs, prompt {PROMPT}, answers {ANSWER} and {ANSWER // 2}"
    benchmark.pedantic(attend, args=(side,), rounds=10, warmup_rounds=2)
