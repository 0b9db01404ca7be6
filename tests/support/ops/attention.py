"""Layouts of prompts with completions, and random inputs of packed attention."""

from itertools import count

import torch

from fastdpo.ops import definitions, pack, packed_attention
from tests.support.accuracy import assert_as_accurate_as

HEADS = {  # H, H_kv, D, D_v
    "multi-head": (4, 4, 8, 8),
    "grouped": (4, 2, 8, 8),
    "multi-query": (3, 1, 16, 16),  # also, the number of heads is not a power of two
    "wide values": (4, 2, 8, 12),  # torch's flash attention needs D_v = D, so keys are padded
    "narrow values": (4, 4, 12, 8),  # values are padded
}
GROUPS = {  # rows of each group: (prompt length, completion lengths, or groups that continue the prompt)
    "single rows": [(5, [3]), (1, [1]), (0, [7])],  # no shared prefixes
    "pairs": [(5, [3, 4]), (9, [1, 6]), (2, [40, 3])],  # lengths that no block size divides
    "threes": [(5, [3, 4, 2]), (1, [1, 1, 9])],
    "mixed": [(4, [2, 3]), (6, [5]), (3, [0, 4]), (3, [2, 0, 0])],  # includes rows without tokens of their own
    "tree": [(5, [3, (4, [2, 3, (1, [6, 2])]), (9, [1, 0, 7])]), (2, [(3, [1, 4]), 2])],  # prefixes in up to 3 pieces
    "long": [(150, [90, 70])],  # several blocks of the flash kernel
}
FEATURES = {  # options, and whether sinks are given
    "plain": ({}, False),
    "window": (dict(window=4), False),  # shorter than some prefixes and completions, longer than others
    "softcap": (dict(softcap=2.0), False),  # within the range of the scores
    "sinks": ({}, True),
    "all": (dict(window=4, softcap=2.0, scale=0.7), True),
}


def rows_of(groups):
    """The layout rows of prompts with completions.

    All ids are distinct except for the shared prompts.
    """
    ids, group_of_row, numbers = [], [], count()

    def add(before, part, group):
        length, continuations = part if isinstance(part, tuple) else (part, None)
        row = before + [next(numbers) for _ in range(length)]
        for continuation in continuations or ():
            add(row, continuation, group)
        if continuations is None:
            ids.append(torch.tensor(row))
            group_of_row.append(group)

    for group, part in enumerate(groups):
        add([], part, group)
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)
    groups = torch.tensor(group_of_row)
    layout = pack(padded, padded >= 0, torch.full_like(padded, -100), groups=groups, store_all=True)
    assert len(layout.token_index) == next(numbers)
    return layout.rows


def attention_inputs(rows, heads="grouped", dtype=torch.float32):
    """query, key, value and an upstream gradient."""
    h, h_kv, d, d_v = HEADS[heads]
    t = int(rows[-1, 2] + rows[-1, 3]) if len(rows) else 0
    return [torch.randn(t, *shape).to(dtype) for shape in ((h, d), (h_kv, d), (h_kv, d_v), (h, d_v))]


def options_of(features, heads="grouped", dtype=torch.float32):
    options, has_sinks = FEATURES[features]
    sinks = {"sinks": torch.randn(HEADS[heads][0]).to(dtype)} if has_sinks else {}
    return {**options, **sinks}


def output_and_gradients(op, query, key, value, upstream, rows, *, sinks=None, **options):
    """The output, and the gradients of query, key, value and, if given, sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value, sinks) if x is not None]
    if sinks is not None:
        options["sinks"] = leaves[3]
    out = op(*leaves[:3], rows, **options)
    out.backward(upstream.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_accurate(rows, inputs, *, sinks=None, **options):
    """Asserts that the output and the gradients are as accurate as those of plain PyTorch."""
    mine = output_and_gradients(packed_attention, *inputs, rows, sinks=sinks, **options)
    eager = output_and_gradients(definitions.packed_attention, *inputs, rows, sinks=sinks, **options)
    wide_sinks = None if sinks is None else sinks.double()
    wide = [x.double() for x in inputs]
    exact = output_and_gradients(definitions.packed_attention, *wide, rows, sinks=wide_sinks, **options)
    dtypes = [inputs[0].dtype] * 4 + ([] if sinks is None else [sinks.dtype])
    for x, eager_x, exact_x, dtype in zip(mine, eager, exact, dtypes, strict=True):
        assert x.dtype == dtype
        assert_as_accurate_as(x, eager_x, exact_x, inputs[0].dtype)
