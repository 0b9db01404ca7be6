"""Models that do more in training than a forward pass in evaluation mode shows: each kind, in each trainer."""

import logging

import pytest

from tests.support.models.trained_effects import EFFECTS
from tests.support.trl.dpo import assert_same, train, train_both
from tests.support.trl.groups import assert_same_groups, train_both_groups
from tests.support.trl.kto import train_kto
from tests.support.trl.reward import reward_model, train_reward
from tests.support.trl.sft import train_sft

TRAINERS = {
    "trl.DPOTrainer": dict(train=train),
    "trl.KTOTrainer": dict(train=train_kto),
    "trl.SFTTrainer": dict(train=train_sft, reference=False),
    "trl.RewardTrainer": dict(train=train_reward, reference=False, build=reward_model),
}


@pytest.mark.parametrize("trainer", [*TRAINERS, "trl.GRPOTrainer"])
@pytest.mark.parametrize("name", EFFECTS)
def test_effect(tmp_path, caplog, name, trainer):
    effect = EFFECTS[name]

    def prepare(model):
        effect.plant(model)
        return model

    with caplog.at_level(logging.WARNING, "fastdpo"):
        if trainer in TRAINERS:
            stock, patched = train_both(tmp_path, trainer=trainer, prepare=prepare, max_steps=2, **TRAINERS[trainer])
            assert_same(stock, patched)
        else:
            stock, patched = train_both_groups(tmp_path, prepare=prepare)
            assert_same_groups(stock, patched)
    paths = {path for kind, path in patched.calls if kind == "policy"}
    assert paths == {"fused" if effect.reason is None else "stock"}
    reasons = [line.rpartition("[")[2].rstrip("]") for line in caplog.messages if "(policy)" in line]
    assert reasons == ([] if effect.reason is None else [effect.reason])
