"""Trainers under autocast: accelerate wraps their models in casts."""

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.contract.harness import each
from tests.support.comparison import assert_fused, assert_same_in_low_precision, differences_of_gradients, largest


@pytest.fixture(autouse=True)
def _own_precision(monkeypatch):
    """accelerate keeps the precision of an earlier trainer, and older TrainingArguments set a variable."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@each(lambda harness: harness.build and harness.name.startswith("trl."))
def test_autocast(harness, tmp_path):
    """In one step, as its rounding may change what a policy generates later."""
    *_, stock, patched = harness.both(tmp_path, bf16=True, **harness.one_step)
    assert_fused(patched, **harness.fused(1))
    assert {x.dtype for run in (stock, patched) for x in run.gradients[0].values()} == {torch.float32}
    exact = stock.in_float64()
    assert largest(differences_of_gradients(exact.gradients, patched.gradients)).size > 100, "rounded to bfloat16"
    assert_same_in_low_precision(stock, patched, torch.bfloat16, lambda: exact)
