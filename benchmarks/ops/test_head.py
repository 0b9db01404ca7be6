"""The head, forward and backward: ours, TRL's chunked function, and plain PyTorch. No time without an equal result."""

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

from fastdpo import ops

SHAPES = {  # N scored tokens, D hidden size, V vocabulary
    "N1024-D256-V32k": (1024, 256, 32_000),
    "N256-D896-V152k": (256, 896, 151_936),
}
STATISTICS = ("entropy", "mean_logits", "is_top1")


def fastdpo_side(hidden, weight, targets):
    return ops.linear_logps(hidden, weight, targets, outputs=("logps", *STATISTICS)).logps


def trl_side(hidden, weight, targets):
    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, STATISTICS)[0]


def torch_side(hidden, weight, targets):
    return ops.reference.linear_logps(hidden, weight, targets, outputs=("logps", *STATISTICS)).logps


@pytest.mark.parametrize("head", ["trainable", "frozen"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", [fastdpo_side, trl_side, torch_side], ids=["fastdpo", "trl", "torch"])
def test_head(benchmark, side, shape, head):
    n, d, v = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator).requires_grad_()
    weight = (torch.randn(v, d, generator=generator) * d**-0.5).requires_grad_(head == "trainable")
    targets = torch.randint(0, v, (n,), generator=generator)
    inputs = (hidden, weight) if head == "trainable" else (hidden,)

    def step(side):
        logps = side(hidden, weight, targets)
        return logps.detach(), *torch.autograd.grad(logps.sum(), inputs)

    for found, expected in zip(step(side), step(torch_side), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    benchmark.group = f"head {shape} {head}"
    benchmark.pedantic(step, args=(side,), rounds=5, warmup_rounds=1)
