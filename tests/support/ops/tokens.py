"""Random logits and targets, and calls of `token_logps` that return its results and the gradient."""

import torch

from fastdpo.ops import definitions, token_logps
from tests.support.accuracy import assert_as_accurate_as
from tests.support.ops import heads
from tests.support.ops.heads import OUTPUTS

OPTIONS = {
    **heads.OPTIONS,
    "negative scale": dict(logit_scale=-0.5),  # what a kernel reads beyond a row must not become +inf
}


def logits_and_targets(n, v, dtype=torch.float32):
    """Logits with a confident prediction in every third row, and targets with the last word and one ignored."""
    logits, targets = 3 * torch.randn(n, v), torch.randint(v, (n,))
    if n > 1:
        targets[0] = v - 1
    logits[torch.arange(1, n, 3), targets[1::3]] += 12
    targets[n // 2 + 1 :: n] = -100
    return logits.to(dtype), targets


def results_and_gradient(op, logits, targets, upstream, differentiate=("logps", "entropy"), **options):
    leaf = logits.detach().clone().requires_grad_()
    results = op(leaf, targets, outputs=OUTPUTS, **options)
    sum(
        (getattr(results, name) * g).sum()
        for name, g in zip(("logps", "entropy"), upstream, strict=True)
        if name in differentiate
    ).backward()
    return results, leaf.grad


def assert_accurate(*draws, **options):
    """Compares errors over all draws together: for one token, eager may be exact by chance."""

    def collected(op, dtype=None):
        calls = [
            results_and_gradient(
                op, logits.to(dtype or logits.dtype), targets, upstream.to(dtype or upstream.dtype), **options
            )
            for (logits, targets), upstream in zip(draws, upstreams, strict=True)
        ]
        results = {name: torch.cat([getattr(results, name) for results, _ in calls]) for name in OUTPUTS}
        return {**results, "gradient": torch.cat([gradient for _, gradient in calls])}

    upstreams = [torch.randn(2, *targets.shape) for _, targets in draws]
    mine, eager = collected(token_logps), collected(definitions.token_logps)
    exact = collected(definitions.token_logps, torch.float64)
    given = draws[0][0].dtype
    wide = torch.float64 if given == torch.float64 else torch.float32
    assert torch.equal(mine.pop("is_top1"), exact.pop("is_top1"))
    for name, value in mine.items():
        assert value.dtype == (given if name == "gradient" else wide)
        assert_as_accurate_as(value, eager[name], exact[name])
