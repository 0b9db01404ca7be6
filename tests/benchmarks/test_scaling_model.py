"""The model of steps on many GPUs, what it is held against, and its page."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import scaling_check, scaling_page
from benchmarks import scaling_model as m

ALLOWED = 0.15
CLUSTER = m.Cluster(rate=2.0, devices=8, local=100.0, network=5.0, base_latency=1, local_latency=2, network_latency=3)
PREDICTED = json.loads(m.PREDICTIONS.read_text())
CHECKED = json.loads(scaling_check.RESULTS.read_text())


@pytest.mark.parametrize(
    ("ranks", "one_per_node", "seconds"),
    [
        (1, False, 0),
        (8, False, 1 + 7 * 2 + 700 / 100),  # inside a node
        (16, False, 1 + 14 * 2 + 3 + 750 / 40),  # 8 cards of each node
        (4, True, 1 + 3 * 3 + 600 / 5),  # one card of each node
    ],
)
def test_a_ring(ranks, one_per_node, seconds):
    assert CLUSTER.ring_seconds(800, ranks, one_per_node=one_per_node) == pytest.approx(seconds)


def test_collectives_are_hidden_by_compute():
    phases = [m.Phase(1.0, 2.0, 5.0), m.Phase(3.0, 3.0, 2.0)]
    assert m.step_of(phases, True, optimizer=0.5) == m.Step(4.0, 1.0, 3.0, optimizer=0.5)
    assert m.step_of(phases, False).collectives == 7.0


def test_padded_rows_and_balanced_pairs():
    """Two ranks with two pairs each: one long pair pads its neighbour, and is balanced by the others."""
    lengths = m.lengths_of([(100, 10, 10), (2, 3, 3), (2, 3, 3), (2, 3, 3)])
    cost = m.CostModel(token=1.0)
    assert m.padded_costs(cost, lengths, 2).tolist() == [4 * 110, 4 * 5]
    assert sorted(m.balanced_costs(cost, lengths, 2)) == [3 * 6, 118]


def test_predictions_are_those_of_the_model():
    model = m.Model.of_size(m.SIZES["8B"])
    for name, engine in m.ENGINES.items():
        t = engine.tensor_parallel
        for side, load in m.loads(m.DATASET, model.cost, 32 // t, m.PAIRS * t).items():
            (case,) = scaling_page.by_side(PREDICTED, model="8B", engine=name, ranks=32, side=side).values()
            assert scaling_page.read_step(case) == pytest.approx(m.predict(m.h100(), model, engine, 32, load))


def test_a_published_scaling_is_predicted():
    model = m.Model.of_size(m.SIZES["8B"])
    published = m.PRETRAINING.tokens_per_second[128]
    assert abs(m.PRETRAINING.predict(m.h100(), model, 128) / published - 1) < ALLOWED
    slow = replace(m.h100(), network=1e9)
    assert m.PRETRAINING.predict(slow, model, 128) / published - 1 < -ALLOWED


def test_measured_steps_are_predicted():
    alone = {found["side"]: found for found in CHECKED["launches"] if found["ranks"] == 1}
    several = [found for found in CHECKED["launches"] if found["ranks"] > 1]
    assert {found["ranks"] for found in several} == {2, 4}
    assert not CHECKED["quick"]
    for found in several:
        launch = scaling_check.Launch(found["ranks"], found["side"])
        measured = scaling_check.medians(found)
        error = scaling_check.predicted(launch, alone[launch.side], found).mean() / measured.mean() - 1
        assert abs(error) < ALLOWED, (launch, error)
        assert found["elements"] == scaling_check.elements(launch.size)


@pytest.mark.parametrize("side", scaling_check.SIDES)
def test_collectives_of_a_step_are_those_of_the_model(side):
    launch = scaling_check.Launch(2, side, scaling_check.QUICK_SIZE, rounds=1)
    found = scaling_check.measure(launch)
    assert found["elements"] == scaling_check.elements(launch.size)
    assert np.shape(found["seconds"]) == (1, scaling_check.BATCHES)


def test_the_page_is_up_to_date():
    assert scaling_page.page(PREDICTED, CHECKED) == scaling_page.PAGE.read_text(), "python -m benchmarks.scaling_model"
    assert scaling_page.PLOT.exists()
