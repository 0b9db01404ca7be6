"""Trainings of GRPO and RLOO in float64 whose steps accumulate batches, for `budgets`."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, TrainerCallback

from tests.support.comparison import double
from tests.support.trl.dpo import Run, record
from tests.support.trl.groups import NAMES, build_group
from tests.support.trl.online import writer

STEPS = dict(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    num_generations=4,
    beta=0.1,
    max_steps=2,
    learning_rate=0.05,
    epsilon=0.02,
)
"""Steps of 16 rows: four prompts in one process, two on each of two ranks."""
ROUNDING = 5e-5
"""That of float32, in which norms, rotary embeddings and rewards are computed in any dtype, after several steps."""


def trained(
    directory: Path,
    trainer: str,
    reference: PreTrainedModel | Path | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **options,
) -> Run:
    """Trains with the patches that are active. `options` are arguments of `build_group`."""
    given = {**STEPS, "steps_per_generation": options.get("gradient_accumulation_steps", 4), **options}
    given.setdefault("trainer_class", next(kind for kind, name in NAMES.items() if name == trainer))
    if "peft_config" not in options and reference is None:
        reference = double(writer(1))
    others = callbacks

    def make(callbacks: list[TrainerCallback]):
        every_callback = [*callbacks, *others]
        return build_group(directory, double(writer(0)), reference=reference, callbacks=every_callback, **given)

    return record(make)


def assert_same(stock: Run, patched: Run) -> None:
    """Asserts that two trainings have the same logs, in the same order, and the same gradients."""
    assert [list(log) for log in stock.logs] == [list(log) for log in patched.logs]
    for log, other in zip(stock.logs, patched.logs, strict=True):
        assert other == pytest.approx(log, rel=ROUNDING, abs=ROUNDING, nan_ok=True)
    assert len(stock.gradients) == len(patched.gradients) > 0
    for step, other in zip(stock.gradients, patched.gradients, strict=True):
        assert step.keys() == other.keys()
        for name in step:
            assert step[name].dtype == torch.float64
            assert (other[name] - step[name]).norm() <= ROUNDING * step[name].norm(), name
