"""Trainings on turns of conversations, grouped by `patch(group_prompts=True)`, and stock ones in the same order."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from torch.utils.data import SequentialSampler
from trl import DPOTrainer

import fastdpo
from fastdpo.batching import Kinship
from tests.support.comparison import double
from tests.support.programs.workload import as_conversations
from tests.support.trl.dpo import assert_same, long_pairs, recorded_layouts, tiny_model, train


def conversations(n: int = 4, turns: int = 4) -> list[dict[str, str]]:
    """Turns of n conversations."""
    return as_conversations(long_pairs(((6, 5, 4),) * n * turns), turns)


class Sequential(DPOTrainer):
    """Trains on the pairs in the order of the dataset."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def recorded_orders(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list to which the order of each following epoch is appended."""
    grouped, orders = Kinship.grouped, []

    def recorded(*args, **options):
        order = grouped(*args, **options)
        orders.append(order.tolist())
        return order

    monkeypatch.setattr(Kinship, "grouped", recorded)
    return orders


def assert_steps_are_those_of_stock(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that a grouped training has the losses, metrics and gradients of a stock one with the same batches."""
    data, options = conversations(), dict(per_device_train_batch_size=4, max_steps=-1, num_train_epochs=1)
    orders, layouts = recorded_orders(monkeypatch), recorded_layouts(monkeypatch)
    with fastdpo.patched("trl.DPOTrainer", group_prompts=True):
        patched = train(directory / "grouped", tiny_model(), tiny_model(seed=1), data=data, **options)
    assert {path for _, path in patched.calls} == {"fused"}
    assert sorted(orders[0]) == list(range(len(data))) != orders[0]
    assert max(int(layout.multiplicity.max()) for layout in layouts) > 3, "turns share more than a pair does"

    def in_that_order(name, cast=lambda model: model):
        again = dict(data=[data[i] for i in orders[0]], trainer_class=Sequential, **options)
        return train(directory / name, cast(tiny_model()), cast(tiny_model(seed=1)), **again)

    stock = in_that_order("stock")
    stock.in_float64 = functools.partial(in_that_order, "float64", double)
    assert_same(stock, patched)
