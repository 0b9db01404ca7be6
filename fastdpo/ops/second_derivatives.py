"""Gradients that can be differentiated again, or that are transformed: those of an op's definition.

In a backward with `create_graph=True`, and only there, gradients are enabled. Kernels and the loops over tiles have no
derivative, and `torch.func.vmap` cannot run them for many upstream gradients at once, so the op is then computed once
more as it is defined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

uses: deque[None] = deque(maxlen=1)
"""Not empty once a backward was to be differentiated again, which compiled layers cannot."""


def gradients_of_definition(
    define: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of some inputs, with the graph that they were computed by.

    Args:
        define: computes the outputs of the op from its inputs. Those that have gradients come first.
        inputs: those of the op, as autograd has saved them.
        needs: of which inputs the gradient is needed. None is returned for the others.
        upstream: the gradients of the outputs, None for an output that has none.
    """
    again = torch.is_grad_enabled()
    if again:
        uses.append(None)
    # One tensor may be several inputs. Autograd would give each of them the gradient of all.
    with torch.enable_grad():
        views = [x.view_as(x) if x is not None and needed else x for x, needed in zip(inputs, needs, strict=True)]
        results = define(*views)
    differentiated = [x for x, needed in zip(views, needs, strict=True) if x is not None and needed]
    pairs = [(x, grad) for x, grad in zip(results, upstream, strict=False) if x is not None and grad is not None]
    outputs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, differentiated, grads, create_graph=again))
    return [next(found) if x is not None and needed else None for x, needed in zip(views, needs, strict=True)]
