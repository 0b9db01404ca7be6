"""The small case on which a backend for attention is compared with its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..choice.poisoned_memory import placed, random_values
from ..choice.verdicts import Comparison
from . import definitions
from .device_layout import AttentionCall, AttentionOptions, DeviceLayout, Kind, rows_of

ROWS = torch.tensor(
    [[0, 0, 0, 150], [0, 150, 150, 50], [0, 140, 200, 33], [60, 160, 233, 15], [248, 0, 248, 20], [268, 0, 268, 20]],
    dtype=torch.int32,
    device="cpu",
)
"""A prompt, two completions of it, a row that begins as the second one, a row without a prefix, and
a row that no other one may read from.
"""
PACKED, BEFORE_FOREIGN = 288, 268  # tokens, and those before the last row
FOREIGN = 32.0  # times random numbers: the last row in the trial of a library
WINDOW = 48


def packed_attention(
    call_of: Callable[[Kind], AttentionCall],
    device: torch.device,
    dtype: torch.dtype,
    d: int,
    d_v: int,
    heads: int = 4,
    key_heads: int = 2,
    windowed: bool = False,
    capped: bool = False,
    with_sinks: bool = True,
    whole_tiles: bool = False,
) -> Iterator[Comparison]:
    """Forward and backward of an attention backend.

    The last row is full of NaN, or of large numbers if the backend may multiply whole tiles, in which
    the probabilities of other rows are 0 but their values are not: 0 times NaN is NaN.
    """
    options = AttentionOptions(d**-0.5, WINDOW if windowed else None, 5.0 if capped else None)
    sizes = (heads, d), (key_heads, d), (key_heads, d_v), (heads, d_v)
    values = [random_values(PACKED, *size, seed=i).to(dtype).double() for i, size in enumerate(sizes)]
    for x in values:
        x[BEFORE_FOREIGN:] *= FOREIGN if whole_tiles else torch.nan
    q, k, v, grad = (placed(x, device, dtype) for x in values)
    query, key, value = leaves = [x[:BEFORE_FOREIGN].requires_grad_() for x in values[:3]]
    sinks = random_values(heads, seed=4).to(dtype).double()
    for sink in (sinks, None) if with_sinks else (None,):
        exact = definitions.packed_attention(query, key, value, ROWS[:-1], **options._asdict(), sinks=sink)
        call = call_of(Kind.of(q, v, options))
        layout = DeviceLayout(call.describe(rows_of(ROWS, PACKED)), device).contents
        out, lse = call.forward(q, k, v, None if sink is None else sink.to(device, dtype), layout)
        yield "attention", out[:BEFORE_FOREIGN], exact
        gradients = torch.autograd.grad(exact, leaves, values[3][:BEFORE_FOREIGN])
        found = call.backward(grad, q, k, v, out, lse, layout)
        for name, x, slope in zip(("queries", "keys", "values"), found, gradients, strict=True):
            yield f"gradient of {name}", x[:BEFORE_FOREIGN], slope
