"""Each option of a trainer: on the expected path, and equal to stock."""

import pytest
from packaging.version import Version
from peft import peft_model

from fastdpo.integrations.admission.versions import installed_version
from fastdpo.integrations.registry import CUT_BY_MAX_TOKENS
from fastdpo.models.calls import outcomes
from tests.contract.harness import cases, each
from tests.support.comparison import assert_fused


@pytest.fixture
def described(monkeypatch):
    """Whether a model was that of a patched trainer, each time that PEFT has described one, as its context does."""
    found, stock = [], peft_model.get_layer_status

    def describe(model):
        found.append("disable_adapter" in vars(model))
        return stock(model)

    monkeypatch.setattr(peft_model, stock.__name__, describe)
    return found


ABOVE_ZERO = {"accurate tokens": ("mean_token_accuracy", 0.2), "KL terms above zero": ("kl", 1.0)}
"""Options that move a metric away from 0, which would hide errors, and how far."""


@cases("options")
def test_option(case, tmp_path, described):
    options, calls = case.value
    runs = case.harness.both(tmp_path, **options)
    assert not runs[0].calls
    assert_fused(runs[-1], **calls)
    assert ("aux_loss" in runs[0].logs[0]) == case.name.startswith("router loss")
    case.harness.assert_same(*runs)
    if case.name in ABOVE_ZERO:
        metric, least = ABOVE_ZERO[case.name]
        assert max(log.get(metric, 0.0) for log in runs[0].logs) > least
    assert True not in described


RECORDED = ("trl.GRPOTrainer", "trl.RLOOTrainer")
"""Trainers with a loss of their own here, whose batches are kept (see `tests/integrations/test_own_budget.py`)."""


def has_budget(harness) -> bool:
    """Steps of TRL before 1.8 are not cut."""
    return harness.name in CUT_BY_MAX_TOKENS and Version(installed_version("trl") or "0") >= Version("1.8")


@each(lambda harness: has_budget(harness) and harness.name not in RECORDED)
def test_accumulated_batches_are_merged_by_default(harness, tmp_path):
    options = harness.options["accumulation"][0] | dict(max_steps=6, per_device_train_batch_size=2)
    outcomes.clear()
    runs = harness.both(tmp_path, **options)
    assert {path for _, path in runs[-1].calls} == {"fused"}
    assert outcomes[harness.name, "steps"] == 6
    assert outcomes[harness.name, "micro-batches"] < 12
    harness.assert_same(*runs)
