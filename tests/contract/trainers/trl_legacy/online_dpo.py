"""OnlineDPOTrainer of TRL < 0.29."""

from peft import LoraConfig

from tests.contract.harness import Harness
from tests.support.trl.online import FOR_HARNESS, reward, reward_model

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


def calls_of(options: dict) -> dict[str, int]:
    """Those of two steps."""
    calls = 2 * options.get("gradient_accumulation_steps", 1)
    return dict(policy=calls, reference=calls, reward=calls if "rewards" in options else 0)


HARNESSES = [
    Harness(
        **FOR_HARNESS,
        options={name: (dict(max_steps=2, **options), calls_of(options)) for name, options in OPTIONS.items()},
        verified={"as it is": ({}, 2)},
    )
]
