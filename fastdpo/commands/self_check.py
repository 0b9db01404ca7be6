"""Runs every op that has kernels on a small case, on the device at hand, against its definition.

for op, failure in self_check.run(torch.device("cuda"), torch.bfloat16): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import ops
from ..ops import definitions
from ..testing import assert_as_accurate_as

N, V, D = 37, 101, 48
H, H_KV = 4, 2
HEAD_SIZE = 32

_TARGETS = torch.arange(N, device="cpu") * 7 % V
_TARGETS[::5] = ops.IGNORE_INDEX
_CU_SEQLENS = torch.tensor([0, 11, 12, 30, N], dtype=torch.int32, device="cpu")
_REF = torch.tensor([[-30.0, -5.0], [-80.0, -20.0]], device="cpu")
_ROWS = torch.tensor([[0, 0, 0, 9], [0, 9, 9, 12], [0, 9, 21, 3], [24, 0, 24, 13]], dtype=torch.int32, device="cpu")
"""A prompt, two completions of it, and a row without a prefix."""

_SHAPES = {
    "logits": (N, V),
    "hidden": (N, D),
    "weight": (V, D),
    "query": (N, H, HEAD_SIZE),
    "key": (N, H_KV, HEAD_SIZE),
    "value": (N, H_KV, HEAD_SIZE),
}
_CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "token_logps": (("logits",), dict(targets=_TARGETS, softcap=30.0, outputs=("logps", "entropy"))),
    "sequence_logps": (("logits",), dict(targets=_TARGETS, cu_seqlens=_CU_SEQLENS)),
    "linear_logps": (("hidden", "weight"), dict(targets=_TARGETS, outputs=("logps", "mean_logits"))),
    "linear_sequence_logps": (("hidden", "weight"), dict(targets=_TARGETS, cu_seqlens=_CU_SEQLENS)),
    "linear_preference_loss": (
        ("hidden", "weight"),
        dict(targets=_TARGETS, cu_seqlens=_CU_SEQLENS, ref_chosen_logps=_REF[0], ref_rejected_logps=_REF[1]),
    ),
    "packed_attention": (("query", "key", "value"), dict(rows=_ROWS, window=8)),
}
"""Of each op: the arguments with gradients, and the others."""


def run(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, str | None]]:
    """Checks each op on a device in a dtype: results and gradients, as `testing.assert_as_accurate_as` judges them.

    Yields:
        The name of the op in `fastdpo.ops`. How its results or gradients differ from the definition, or the error
        that it raised; None if they are as accurate as plain PyTorch.
    """
    for name in _CASES:
        yield name, _failure(name, device, dtype)


def _failure(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    leaves, others = _CASES[name]
    generator = torch.Generator().manual_seed(0)
    on_host = (torch.randn(_SHAPES[x], generator=generator, dtype=torch.float64, device="cpu") for x in leaves)
    values = {leaf: x.to(device, dtype) for leaf, x in zip(leaves, on_host, strict=True)}

    def outcome(op: Callable, dtype: torch.dtype, others: dict[str, Any]) -> list[Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in values.values()]
        output = op(*inputs, **others)
        results = [x for x in tree_leaves(output) if x is not None]
        trained = [x for x in results if x.requires_grad]
        ones = [torch.ones_like(x) for x in trained]
        return [*results, *torch.autograd.grad(trained, inputs, ones)]

    on_device = {k: x.to(device) if isinstance(x, Tensor) and k != "rows" else x for k, x in others.items()}
    try:
        found = outcome(getattr(ops, name), dtype, on_device)
        eager = outcome(getattr(definitions, name), dtype, on_device)
        exact = outcome(getattr(definitions, name), torch.float64, on_device)
        names = chain((f"result {i}" for i in range(len(found) - len(leaves))), (f"gradient of {x}" for x in leaves))
        for what, *tensors in zip(names, found, eager, exact, strict=True):
            try:
                assert_as_accurate_as(*tensors, dtype=dtype)
            except AssertionError as error:
                return f"{what}: {error}"
    except Exception as error:  # a kernel may fail to compile, to fit the device or to launch
        return f"{type(error).__name__}: {error}"
    return None
