"""OnlineDPOTrainer of TRL < 0.29, stock against patched."""

import pytest
from peft import LoraConfig

from tests.support.trl.online import assert_option_trains_alike, reward, reward_model, train_online, writer
from tests.support.trl.verified import assert_verified

LONG = [{"prompt": " ".join(f"w{(7 * i + j) % 94}" for j in range(n))} for i, n in enumerate((3, 30, 8, 13, 20, 1))]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
OPTIONS = {
    "as it is": dict(),
    "ipo": dict(loss_type="ipo"),
    "no end": dict(generation_kwargs={"suppress_tokens": list(range(1, 21))}),
    "prompts cut": dict(max_length=12, data=LONG, per_device_train_batch_size=2),
    "rewards": dict(rewards=lambda: [reward_model(), reward], reward_weights=[3.0, 0.1]),
    "copied reference": dict(reference=False, learning_rate=0.1),
    "adapter": dict(reference=False, peft_config=LORA),
    "accumulation": dict(gradient_accumulation_steps=2),
    "checkpointing": dict(gradient_checkpointing=True),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(tmp_path, option):
    assert_option_trains_alike(tmp_path, **OPTIONS[option])


def test_verifying(tmp_path, caplog):
    assert_verified(
        lambda directory: train_online(directory, writer(0), writer(1)),
        tmp_path,
        "trl.OnlineDPOTrainer",
        caplog=caplog,
    )
