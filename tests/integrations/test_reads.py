"""No step waits for the device because of fastdpo, except to pack a batch that has come without a layout."""

import pytest
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.experimental.tpo import TPOTrainer

import fastdpo
from tests.support.reads import Reads
from tests.support.trl.dpo import adapter, tiny_model, train
from tests.support.trl.groups import train_group
from tests.support.trl.kto import train_kto
from tests.support.trl.online import train_online, writer
from tests.support.trl.reference_free import train_cpo, train_orpo
from tests.support.trl.reward import reward_model, train_reward
from tests.support.trl.sft import train_sft
from tests.support.trl.tpo import train_tpo


def rewarded(directory, model, reference, **options):
    return train_reward(directory, reward_model(), **options)


def grouped(directory, model, reference, **options):
    return train_group(directory, writer(), reference=writer(1), **options)


# trainer: (its class, the function that trains with it, options, batches that are packed in a step)
TRAINERS = {
    "DPO": (DPOTrainer, train, dict(), 0),
    "DPO, LoRA": (DPOTrainer, train, adapter(), 0),
    "Reward": (RewardTrainer, rewarded, dict(), 0),
    "SFT": (SFTTrainer, train_sft, dict(), 0),
    "KTO": (KTOTrainer, train_kto, dict(), 3),  # completions, their KL term, and both for the reference
    "ORPO": (ORPOTrainer, train_orpo, dict(), 1),
    "CPO": (CPOTrainer, train_cpo, dict(), 1),
    "TPO": (TPOTrainer, train_tpo, dict(), 0),
    "OnlineDPO": (OnlineDPOTrainer, train_online, dict(), 1),
    "GRPO": (GRPOTrainer, grouped, dict(beta=0.1), 2),  # policy and reference
    "RLOO": (RLOOTrainer, grouped, dict(beta=0.1), 3),  # and the old policy
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_step_reads_nothing(name, tmp_path):
    kind, train_with, options, packed = TRAINERS[name]
    steps: list[Reads] = []

    class Watched(kind):
        def training_step(self, *args, **kwargs):
            steps.append(Reads())
            with steps[-1]:
                return super().training_step(*args, **kwargs)

    trainer = f"trl.{kind.__name__}"
    reference = None if options.get("reference") is False else tiny_model(seed=1)
    options = {key: x for key, x in options.items() if key != "reference"}
    with fastdpo.patched(trainer):
        run = train_with(tmp_path, tiny_model(), reference, trainer_class=Watched, **options)
    assert {path for _, path in run.calls} == {"fused"}
    first, *others = steps
    assert first.own, "the first step examines the model, which is seen"
    assert others
    for step in others:
        assert not step.own
        assert step.packed == packed
