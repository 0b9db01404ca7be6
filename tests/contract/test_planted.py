"""Models are more than their weights: with hooks, state and attributes of users, training equals stock."""

import pytest

from fastdpo.models.running import compiled
from fastdpo.ops.choice import notes
from tests.contract.harness import each, harnesses
from tests.support.kernels import recorder
from tests.support.models.planted import PLANTED
from tests.support.models.trained_effects import EFFECTS

TRAINERS = [x for x in harnesses() if x.name in {f"trl.{x}Trainer" for x in ("DPO", "KTO", "Reward", "SFT", "GRPO")}]
STEPS = 3

UNSEEN = {
    "trl.KTOTrainer": ("switched buffer", "changed entry", "changing attribute", "scale of lengths"),
    "trl.GRPOTrainer": ("scale of lengths",),
    "trl.SFTTrainer": ("scale of lengths",),
}
"""What a trainer's calls do not show: patched, KTO makes fewer of them, and batches of these are short."""

CASES = [
    pytest.param(harness, name, id=f"{harness.name}-{name}")
    for harness in TRAINERS
    for name in (*PLANTED, *EFFECTS)
    if name not in UNSEEN.get(harness.name, ())
]


def reasons_in(messages) -> set[str]:
    return {x.rpartition("[")[2].rstrip("]") for x in messages if ": not fused, " in x}


@pytest.mark.parametrize(("harness", "name"), CASES)
def test_a_model_with_more_than_weights(harness, name, tmp_path, caplog):
    """Those with an effect in training are not fused in any step."""
    planted = (PLANTED | EFFECTS)[name]
    runs = harness.both(tmp_path, prepare=lambda model: planted.plant(model) or model, max_steps=STEPS)
    assert reasons_in(caplog.messages) == set(planted.reasons)
    paths = {path for role, path in runs[-1].calls if role == "policy"}
    assert ("stock" in paths) == bool(planted.reasons)
    assert len(paths) == 1 or name in PLANTED
    harness.assert_same(*runs)


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("compile", [True, "auto"])
@pytest.mark.parametrize("harness", [pytest.param(x, id=x.name) for x in TRAINERS if x.name == "trl.DPOTrainer"])
def test_with_compiled_layers_and_graphs(harness, compile, name, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    recorder.install(monkeypatch)
    planted = PLANTED[name]
    options = {"prepare": lambda model: planted.plant(model) or model, "compile": compile}
    runs = harness.both(tmp_path, max_steps=STEPS, **options)
    assert reasons_in(caplog.messages) == set(planted.reasons)
    harness.assert_same(*runs)


@pytest.mark.parametrize("option", [None, "adapter"])
@each(lambda harness: harness.name.startswith("trl."))
def test_what_a_clock_finds_to_pay(harness, option, tmp_path, monkeypatch, caplog):
    """Each trainer replays graphs, compiles its layers between two steps, and trains as before."""
    caplog.set_level("INFO", "fastdpo")
    monkeypatch.setenv(notes.VARIABLE, "0")
    recorder.install(monkeypatch)
    recorder.compile_layers(monkeypatch)
    options, _ = harness.options.get(option, ({}, None))
    runs = harness.both(tmp_path, **{**options, "max_steps": 6})
    assert "replayed" in {path for _, path in runs[-1].calls}
    assert [x for x in caplog.messages if "(policy): layers are compiled from step" in x]
    harness.assert_same(*runs)
