"""Faults that a test plants in fastdpo, which a comparison with stock must then notice.

Each replaces a public function or property, by which all batches of all trainers pass, until the test ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fastdpo import packing
from fastdpo.models import attention, batch, head, parts, scoring
from fastdpo.models.examine import probe
from fastdpo.packing import Layout
from fastdpo.prefix_tree import Branch

Fault = Callable[[pytest.MonkeyPatch], None]


def raising(error: Exception) -> Callable[..., Any]:
    """A function that raises an error, whatever it is given."""

    def function(*_, **__):
        raise error

    return function


def out_of_memory(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Has some calls of a model raise an error behind the head, by their numbers from 0."""
    stock, numbers = scoring.ScoredBatch, itertools.count()

    def scored_batch(*args, **kwargs):
        if next(numbers) in calls:
            raise torch.OutOfMemoryError("planted")
        return stock(*args, **kwargs)

    monkeypatch.setattr(scoring, "ScoredBatch", scored_batch)


def in_layouts(edit: Callable[[Layout], Layout], *, probes: bool = True) -> Fault:
    """A fault in the layout of every batch that is packed, those of ``probes`` included."""
    module, name = (packing, "make_layout") if probes else (batch, "layout_of")
    right = getattr(module, name)

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, name, lambda *args, **options: edit(right(*args, **options)))

    plant.__name__ = edit.__name__
    return plant


def in_masks(edit: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """A fault in the mask of every layout, int32 [..., 4]."""
    right = Layout.mask.fget

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Layout, "mask", property(lambda self: edit(right(self).clone())))

    plant.__name__ = edit.__name__
    return plant


@partial(in_layouts, probes=False)
def targets_off_by_one(layout: Layout) -> Layout:
    """Scores each target from the hidden state before the right one."""
    return replace(layout, score_index=(layout.score_index - 1).clamp(min=0))


@in_layouts
def labels_a_token_late(layout: Layout) -> Layout:
    return replace(layout, targets=layout.targets.roll(1))


@in_layouts
def wrong_target(layout: Layout) -> Layout:
    """One target is another token."""
    targets = layout.targets.clone()
    targets[-1] = (targets[-1] + 1) % 90
    return replace(layout, targets=targets)


@in_layouts
def late_positions(layout: Layout) -> Layout:
    """The position of a token is skipped."""
    return replace(layout, position_ids=layout.position_ids + (layout.position_ids > 3))


@in_masks
def no_prefix(mask: torch.Tensor) -> torch.Tensor:
    """Rows do not see the tokens that they share."""
    mask[..., 1] = 0
    return mask


@in_masks
def leak(mask: torch.Tensor) -> torch.Tensor:
    """The second row of each pair also sees the first row's completion."""
    second = mask[..., 1] > 0
    mask[..., 1][second] = (mask[..., 2] - mask[..., 0])[second]
    return mask


def results_a_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Layout.unpack
    monkeypatch.setattr(Layout, "unpack", lambda self, x: right(self, x).roll(1, 1))


def without_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of each batch is not scored."""
    right = Layout.unpack

    def unpack(self: Layout, x: torch.Tensor) -> torch.Tensor:
        results = right(self, x).clone()
        results.view(-1)[self.output_index[0]] = 0
        return results

    monkeypatch.setattr(Layout, "unpack", unpack)


def another_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows take the prompt of the first."""
    make, tree = packing.make_layout, packing.prefix_tree

    def in_one_group(ids, mask, labels, form, shifted):
        groups = torch.zeros(len(ids), dtype=torch.int64) if form.groups else None
        return make(ids, mask, labels, form._replace(groups=groups), shifted)

    def prefix_tree(*args):
        first, *others = tree(*args)
        return [first, *(branch if branch.shared else Branch(0, 1, 0) for branch in others)]

    monkeypatch.setattr(packing, "make_layout", in_one_group)
    monkeypatch.setattr(packing, "prefix_tree", prefix_tree)


def in_attention(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Callable], Callable]) -> None:
    """A fault in the attention of every model, with and without the checks of its arguments."""
    for name in ("attend", "packed_attention"):
        monkeypatch.setattr(attention, name, edit(getattr(attention, name)))


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention scores are too large by a thousandth."""

    def scaled(right):
        return lambda *args, scale, **options: right(*args, scale=scale * 1.001, **options)

    in_attention(monkeypatch, scaled)


def no_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the softcap of a head."""
    monkeypatch.setattr(parts, "logit_transform", lambda config: (None, 1.0))


SOFTCAPPED = dict(kind="gemma2", final_logit_softcapping=2.0)
"""A tiny model whose head has a softcap."""


def scaled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the gradients of all weights but the head's too large by a thousandth."""
    right = head.linear_logps

    def wrong(hidden, *args, **kwargs):
        return right(hidden.detach() + 1.001 * (hidden - hidden.detach()), *args, **kwargs)

    monkeypatch.setattr(head, "linear_logps", wrong)


def unnoticed_by_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model passes its probe, which would notice most faults before a training."""
    monkeypatch.setattr(probe, "probe", lambda model, *rest: probe.ProbeResult(None))
    monkeypatch.setattr(probe, "head_difference", lambda model, device: None)
