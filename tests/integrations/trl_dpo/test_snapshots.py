"""Compares twenty steps of three families, stock and patched, with recorded numbers.

`UPDATE_SNAPSHOTS=1 pytest tests/integrations/trl_dpo/test_snapshots.py` records stock training in
float64, where processors differ only in digits that are not compared.
"""

import json
import os

import pytest

import fastdpo
from tests.support import ROOT
from tests.support.comparison import approximately, double
from tests.support.models.families import kind, tiny_family
from tests.support.trl.dpo import assert_fused, train

SNAPSHOTS = ROOT / "tests" / "snapshots"
STEPS = 20
WATCHED = ("loss", "grad_norm", "rewards/margins")
FAMILIES = ("llama", "gemma3_text", "gpt_oss")  # plain; sliding windows and tied head; sinks and experts


def run(name, directory, cast=lambda model: model):
    return train(directory, cast(tiny_family(name)), cast(tiny_family(name, 1)), max_steps=STEPS)


def watched(trained):
    logs = [log for log in trained.logs if "loss" in log]
    return {number: [log[number] for log in logs] for number in WATCHED}


@pytest.mark.parametrize("name", FAMILIES)
def test_twenty_steps(name, tmp_path):
    path = SNAPSHOTS / f"{kind(name)}.json"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(json.dumps(watched(run(name, tmp_path / "float64", double)), indent=1) + "\n")
    stock = run(name, tmp_path / "stock")
    with fastdpo.patched():
        patched = run(name, tmp_path / "patched")
    assert_fused(patched, policy=STEPS, reference=STEPS)
    snapshot = json.loads(path.read_text())
    for trained in (stock, patched):
        for number, values in watched(trained).items():
            assert len(values) == STEPS
            assert values == approximately(snapshot[number], units=4), number  # rounding over twenty steps
