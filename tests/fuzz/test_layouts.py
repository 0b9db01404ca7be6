"""Random batches in packed form, and attention over random layouts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from fastdpo import ops
from fastdpo.ops import definitions
from tests.support.fuzzing import FLOATS, SEEDS, Source, assert_close, fuzzed, noise_of
from tests.support.layouts import assert_layout_is_right


class Batch(NamedTuple):
    """A padded batch.

    Attributes:
        rows, length: its shape.
        vocabulary: few ids, so that rows begin alike by chance as well.
        prompts: how many prompts the rows have; 0 for rows of their own.
        scored: the share of labels that are not -100.
        others: whether labels are no ids of the batch.
        side: on which side rows are padded.
        groups: "none", "content" or "tensor".
        reach: the positions that must exist, or None.
    """

    seed: int
    rows: int
    length: int
    vocabulary: int
    prompts: int
    scored: float
    others: bool
    side: str
    groups: str
    shifted: bool
    store_all: bool
    reach: int | None
    count_padding: bool = False


BATCHES = st.builds(
    Batch,
    seed=SEEDS,
    rows=st.integers(1, 7),
    length=st.integers(1, 14),
    vocabulary=st.sampled_from([1, 2, 5, 1000]),
    prompts=st.integers(0, 3),
    scored=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    others=st.booleans(),
    side=st.sampled_from(["left", "right", "both"]),
    groups=st.sampled_from(["none", "content", "tensor"]),
    shifted=st.booleans(),
    store_all=st.booleans(),
    reach=st.sampled_from([None, None, 3, 30]),
    count_padding=st.booleans(),
)


def batch_of(case: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor | str | None]:
    """input_ids, attention_mask, labels and groups."""
    source = Source(case.seed)
    shape = case.rows, case.length
    real = source.integers(1, case.length, case.rows)
    room = case.length - real
    share = {"left": 1.0, "right": 0.0, "both": 0.5}[case.side]
    offset = (room * share).long()[:, None]
    column = torch.arange(case.length).expand(shape)
    mask = (column >= offset) & (column < offset + real[:, None])
    tokens = source.integers(0, case.vocabulary - 1, *shape)
    groups: Tensor | str | None = None if case.groups in ("none", "tensor") else case.groups
    if case.groups == "tensor":
        groups = source.integers(0, 2, case.rows)
    if case.prompts:
        prompts = source.integers(0, case.vocabulary - 1, case.prompts, case.length)
        prompt_length = source.integers(0, case.length, case.prompts)
        of_row = source.integers(0, case.prompts - 1, case.rows)
        tokens = torch.where(column < prompt_length[of_row][:, None], prompts[of_row], tokens)
        if case.groups == "tensor":
            groups = of_row
    ids = torch.zeros(shape, dtype=torch.long)
    ids[mask] = torch.cat([tokens[i, :n] for i, n in enumerate(real.tolist())])
    scorable = mask.clone()
    if case.shifted:
        following = torch.nn.functional.pad(ids[:, 1:], (0, 1))
        labels = torch.where(scorable & source.mask(case.scored, *shape), following, -100)
    else:
        scorable[:, 1:] &= mask[:, :-1]  # nothing scores the first token of a row
        labels = torch.where(scorable & source.mask(case.scored, *shape), ids, -100)
    if case.others:
        labels = torch.where(labels != -100, case.vocabulary + source.integers(0, 2, *shape), -100)
    return ids, mask, labels, groups


def groups_of_rows(case: Batch, groups: Tensor | str | None) -> Tensor:
    """Equal numbers for rows that may share tokens."""
    if groups == "content":
        return torch.zeros(case.rows)
    return torch.arange(case.rows) if groups is None else groups


def check_layout(case: Batch) -> None:
    ids, mask, labels, groups = batch_of(case)
    options = dict(groups=groups, shifted=case.shifted, store_all=case.store_all, count_padding=case.count_padding)
    layout = ops.pack(ids, mask, labels, **options)
    rows = groups_of_rows(case, groups)
    assert_layout_is_right(layout, (ids, mask, labels), rows, case.shifted, case.store_all, case.count_padding)
    reaching = ops.pack(ids, mask, labels, reach=case.reach, **options)
    assert reaching.position_ids.max() + 1 >= max(case.reach or 0, int(layout.position_ids.max()) + 1)
    assert torch.equal(reaching.rows[: len(layout.rows)], layout.rows)
    assert torch.equal(reaching.unpack(reaching.targets), layout.unpack(layout.targets))


class Attention(NamedTuple):
    """Attention over the layout of a batch."""

    batch: Batch
    dtype: torch.dtype
    kv_heads: int
    per_kv_head: int
    d: int
    d_v: int
    scale: float | None
    window: int | None
    softcap: float | None
    has_sinks: bool


ATTENTION = st.builds(
    Attention,
    batch=BATCHES,
    dtype=FLOATS,
    kv_heads=st.integers(1, 2),
    per_kv_head=st.integers(1, 3),
    d=st.sampled_from([1, 4, 8, 12]),
    d_v=st.sampled_from([1, 4, 8, 12]),
    scale=st.sampled_from([None, None, 0.3, -1.0, 0.0, 1e-39]),  # the last is below the smallest normal float32
    window=st.sampled_from([None, None, 1, 2, 5, 100]),
    softcap=st.sampled_from([None, None, 1.5]),
    has_sinks=st.booleans(),
)


def check_attention(case: Attention) -> None:
    ids, mask, labels, groups = batch_of(case.batch)
    options = dict(shifted=case.batch.shifted, store_all=case.batch.store_all)
    rows = ops.pack(ids, mask, labels, groups=groups, **options).rows
    tokens, source = int(rows[:, 3].sum()), Source(case.batch.seed)
    heads = case.kv_heads * case.per_kv_head
    shapes = ((tokens, heads, case.d), (tokens, case.kv_heads, case.d), (tokens, case.kv_heads, case.d_v))
    leaves = [source.normal(*shape, dtype=case.dtype) for shape in shapes]
    if case.has_sinks:
        leaves.append(source.normal(heads, dtype=case.dtype))
    weights = source.normal(tokens, heads, case.d_v)

    def results(op, inputs):
        inputs = [x.detach().clone().requires_grad_() for x in inputs]
        query, key, value, *sinks = inputs
        options = dict(scale=case.scale, window=case.window, softcap=case.softcap, sinks=sinks[0] if sinks else None)
        out = op(query, key, value, rows, **options)
        (weights.to(out.dtype) * out).sum().backward()
        return [out, *(x.grad for x in inputs)]

    actual, eager = results(ops.packed_attention, leaves), results(definitions.packed_attention, leaves)
    exact = results(definitions.packed_attention, [x.double() for x in leaves])
    norms = [x.double().norm(dim=-1).max().item() for x in leaves[:2]]
    scores = (case.d**-0.5 if case.scale is None else abs(case.scale)) * norms[0] * norms[1]
    names = ("out", "gradient of query", "gradient of key", "gradient of value", "gradient of sinks")[: len(actual)]
    of_scores = weights.norm().item() * leaves[2].double().norm().item() * max(1.0, *norms)  # gradients of scores
    for name, *tensors in zip(names, actual, eager, exact, strict=True):
        least = of_scores if name.startswith("gradient") else 0.0
        assert_close(name, *tensors, noise_of(case.dtype, scores), least)


NO_LABELS = Batch(0, 2, 5, 5, 1, 0.0, False, "right", "tensor", False, False, None)
ONE_TOKEN = NO_LABELS._replace(length=1, scored=1.0, shifted=True)
EQUAL_ROWS = NO_LABELS._replace(rows=4, vocabulary=1, scored=1.0, groups="content")
LONG_ROTARY = EQUAL_ROWS._replace(side="left", reach=30, store_all=True)
LEARNED_POSITIONS = EQUAL_ROWS._replace(side="left", count_padding=True)

test_pack = fuzzed(BATCHES, 0.25, (NO_LABELS, ONE_TOKEN, EQUAL_ROWS, LONG_ROTARY, LEARNED_POSITIONS))(check_layout)
test_packed_attention = fuzzed(ATTENTION, 0.1)(check_attention)
