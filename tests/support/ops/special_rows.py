"""Rows of logits with infinities and NaN, and a comparison of their results with eager PyTorch."""

import torch

from fastdpo.ops import definitions, token_logps
from tests.support.ops.heads import REAL_OUTPUTS

INF, NAN = float("inf"), float("nan")
V, TARGET, OTHER = 67, 41, 5

SPECIAL_ROWS = {  # the target's logit, one other logit, all other logits; None keeps the random value
    "an infinite target": (INF, None, None),
    "an infinite other": (None, INF, None),
    "an infinite target and other": (INF, INF, None),
    "a target of NaN": (NAN, None, None),
    "another of NaN": (None, NAN, None),
    "NaN and infinity": (INF, NAN, None),
    "an infinite target among the impossible": (INF, -INF, -INF),
    "an impossible target": (-INF, None, None),
    "an impossible other": (None, -INF, None),
    "an impossible target and infinity": (-INF, INF, None),
    "nothing possible": (-INF, -INF, -INF),
    "nothing possible but the target": (None, -INF, -INF),
}


def special_row(name, dtype=torch.float32, columns=V):
    """Logits [4, V] and targets [4].

    The rows are a random one, the special one, the special one with an ignored target, and another
    random one.
    """
    target_logit, other_logit, remaining_logits = SPECIAL_ROWS[name]
    logits = 3 * torch.randn(4, columns)
    special = logits[1]
    if remaining_logits is not None:
        special[torch.arange(columns) != TARGET] = remaining_logits
    for column, value in ((TARGET, target_logit), (OTHER, other_logit)):
        if value is not None:
            special[column] = value
    logits[2] = special
    return logits.to(dtype), torch.tensor([3, TARGET, -100, columns - 1])


def assert_special_row(logits, targets, **options):
    """Asserts that results and the gradient of `logps` agree with eager, including NaN."""

    def call(op, logits):
        leaf = logits.detach().clone().requires_grad_()
        results = op(leaf, targets, outputs=REAL_OUTPUTS)
        results.logps.sum().backward()
        return results, leaf.grad

    result, gradient = call(token_logps, logits)
    exact, exact_gradient = call(definitions.token_logps, logits.double())
    eps = 4 * torch.finfo(logits.dtype).eps
    wide = dict(atol=1e-4, rtol=1e-5, equal_nan=True)  # float32 sums
    for name in REAL_OUTPUTS:
        assert torch.allclose(getattr(result, name).double(), getattr(exact, name).double(), **wide), name
    scored = targets != -100
    assert torch.allclose(gradient[scored].double(), exact_gradient[scored], atol=eps, rtol=eps, equal_nan=True)
    assert not gradient[~scored].any()
    assert not any(value[~scored].any() for value in result if value is not None)
