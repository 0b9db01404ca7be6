"""No step waits for the device because of fastdpo, except to pack a batch that has come without a layout."""

import pytest

import fastdpo
from tests.contract.harness import harnesses
from tests.support.reads import Reads
from tests.support.trl.dpo import adapter

PACKED = {
    "trl.DPOTrainer": 0,
    "trl.RewardTrainer": 0,
    "trl.SFTTrainer": 0,
    "trl.KTOTrainer": 3,  # completions, their KL term, and both for the reference
    "trl.ORPOTrainer": 1,
    "trl.CPOTrainer": 1,
    "trl.TPOTrainer": 0,
    "trl.A2POTrainer": 1,
    "trl.OnlineDPOTrainer": 1,
    "trl.GRPOTrainer": 2,  # policy and reference
    "trl.RLOOTrainer": 3,  # and the old policy
}
"""The batches that are packed in a step of each trainer."""
CASES = [pytest.param(x, {}, id=x.name) for x in harnesses() if x.name in PACKED]
CASES += [
    pytest.param(x, dict(dataloader_num_workers=1), id=f"{x.name}, packed in a worker")
    for x in harnesses()
    if PACKED.get(x.name) == 0
]
CASES += [pytest.param(x, adapter(), id="DPO, LoRA") for x in harnesses() if x.name == "trl.DPOTrainer"]


@pytest.mark.parametrize(("harness", "options"), CASES)
def test_a_step_reads_nothing(harness, options, tmp_path):
    steps: list[Reads] = []

    class Watched(harness.trainer_class()):
        def training_step(self, *args, **kwargs):
            steps.append(Reads())
            with steps[-1]:
                return super().training_step(*args, **kwargs)

    models = harness.models()[: 1 if "reference" in options else None]
    options = {**harness.one_step, "max_steps": 3, **options}
    options.pop("reference", None)
    with fastdpo.patched(harness.name):
        run = harness.train(tmp_path, *models, trainer_class=Watched, **options)
    assert {path for _, path in run.calls} == {"fused"}
    first, *others = steps
    assert first.own, "the first step examines the model, which is seen"
    assert others
    for step in others:
        assert not step.own
        assert step.packed == PACKED[harness.name]
