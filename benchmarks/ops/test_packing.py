"""Packing a padded batch on the host."""

import torch

from fastdpo import ops

PAIRS, PROMPT, COMPLETION = 64, 512, 512


def test_packing(benchmark):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 32_000, (2 * PAIRS, PROMPT + COMPLETION), generator=generator)
    ids[PAIRS:, :PROMPT] = ids[:PAIRS, :PROMPT]
    mask = torch.ones_like(ids)
    mask[PAIRS:, PROMPT + COMPLETION // 2 :] = 0  # rejected completions are half as long
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100

    layout = ops.pack_pairs(ids, mask, labels)
    assert len(layout.score_index) == (labels[:, 1:] != -100).sum()
    assert len(layout.token_index) < mask.sum()
    benchmark.group = f"packing {PAIRS} pairs of {PROMPT} + {COMPLETION} / {COMPLETION // 2} tokens on the host"
    benchmark.pedantic(ops.pack_pairs, args=(ids, mask, labels), rounds=10, warmup_rounds=2)
