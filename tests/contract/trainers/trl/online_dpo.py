"""TRL's OnlineDPOTrainer.

Stock includes padding in four metrics. These are compared with `masked`, which is stock with zeros
at padding positions; all other numbers are compared with stock itself.
"""

import torch
from peft import LoraConfig
from transformers import LlamaForCausalLM
from trl.experimental.online_dpo import OnlineDPOTrainer
from trl.trainer.utils import add_fused_lm_head

from fastdpo.integrations.trl import online_dpo
from tests.contract.harness import Harness, bypassed, sabotaged_by, with_dropout
from tests.support import faults
from tests.support.models.altered_heads import ALTERED
from tests.support.trl.dpo import LORA, trained_adapter
from tests.support.trl.online import FOR_HARNESS, assert_all_same, masked, reward, reward_model

FULL = dict(policy=3, reference=3)


def prompts(*sizes: int) -> list[dict]:
    return [{"prompt": " ".join(f"w{(7 * i + j) % 94}" for j in range(size))} for i, size in enumerate(sizes)]


def trained_before(model):
    """The model as another trainer of TRL leaves it."""
    add_fused_lm_head(model)
    return model


GPT2 = dict(without=("head_dim", "num_key_value_heads", "intermediate_size"))
LONG = prompts(3, 30, 8, 13, 20, 1, 12, 17)
OPTIONS = {
    "as it is": (dict(), FULL),
    "ipo": (dict(loss_type="ipo"), FULL),
    "no end": (dict(generation_kwargs={"suppress_tokens": list(range(1, 21))}), FULL),  # no completion is padded
    "one token": (dict(max_new_tokens=1), FULL),
    "batch of one": (dict(per_device_train_batch_size=1), FULL),
    "missing_eos_penalty": (dict(missing_eos_penalty=5.0), FULL),
    "beta": (dict(beta=[0.3, 0.1], max_steps=1), dict(policy=1, reference=1)),  # stock fails in its second step
    # truncation
    "prompts cut": (dict(max_length=12, data=LONG), FULL),
    "trained by TRL before": (dict(prepare=trained_before), FULL),
    # rewards
    "reward model": (dict(rewards=reward_model), FULL | dict(reward=3)),
    "rewards": (dict(rewards=lambda: [reward_model(), reward], reward_weights=[3.0, 0.1]), FULL | dict(reward=3)),
    # reference
    "copied reference": (dict(reference=False, learning_rate=0.1), FULL),
    "adapter": (dict(reference=False, peft_config=LoraConfig(**LORA)), FULL),
    "adapter beside a reference": (dict(peft_config=LoraConfig(**LORA)), FULL),
    "loaded adapter": (dict(reference=False, prepare=trained_adapter, learning_rate=0.1), FULL),  # TRL copies it
    # batches and memory
    "accumulation": (
        # the last batch of an epoch has three of seven prompts
        dict(gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2, data=LONG[1:]),
        dict(policy=4, reference=4),
    ),
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=1, reference=1)),
    # positions that count the padding of a prompt
    "learned positions": (dict(kind="gpt2", tiny=GPT2), FULL),
    # between the head and the logits
    "softcap": (dict(kind="gemma2", tiny=dict(query_pre_attn_scalar=8, final_logit_softcapping=3.0)), FULL),
    "scaled logits": (dict(kind="granite", tiny=dict(logits_scaling=4.0)), FULL),
}


class Loud(LlamaForCausalLM):
    """Scales its logits in a way that neither its head nor its config shows."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 1.5 * output.logits
        return output


def loud(model):
    model.__class__ = Loud
    return model


def _padding_is_scored(monkeypatch):
    stock = online_dpo.batch_of
    monkeypatch.setattr(online_dpo, "batch_of", lambda *args: stock(*args[:-1], torch.ones_like(args[-1])))


def _prompts_a_token_short(monkeypatch):
    stock = online_dpo.batch_of
    monkeypatch.setattr(online_dpo, "batch_of", lambda n, ids, mask, *rest: stock(n, ids[:, 1:], mask[:, 1:], *rest))


class OwnForward(OnlineDPOTrainer):
    def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None):
        logits = model(torch.cat([prompt_ids, completion_ids], 1)).logits[:, prompt_ids.shape[1] - 1 : -1]
        return logits.log_softmax(-1).gather(2, completion_ids[..., None])[..., 0]


ALL_STOCK = {("policy", "stock"): 3, ("reference", "stock"): 3}
HARNESSES = [
    Harness(
        **FOR_HARNESS,
        assert_same_bits=assert_all_same,
        options=OPTIONS,
        fallbacks={
            "an empty prompt": (
                dict(data=prompts(0, 5, 3, 0) * 2),
                ALL_STOCK,
                "a label is scored by a padding position",
            ),
            "prompts that are truncated entirely": (
                dict(max_length=4, data=LONG, generation_kwargs={"min_new_tokens": 4}),
                ALL_STOCK,
                "truncation has left nothing of a prompt",
            ),
            **with_dropout({("policy", "stock"): 3, ("reference", "fused"): 3}, disable_dropout=False),
            "logits that differ from the head's output": (
                dict(prepare=loud),
                ALL_STOCK,
                "the head of Loud gives other logits than its forward (relative difference 0.33)",
            ),
            **{alter.__name__: (dict(prepare=alter), ALL_STOCK, reason) for alter, reason in ALTERED.items()},
        },
        bypassing=bypassed(masked(OwnForward), "_forward", "training_step", name="Recorded"),
        strict=(dict(data=prompts(0, 5, 3, 0)), "padding position"),
        sabotages=sabotaged_by(faults.labels_a_token_late, _padding_is_scored, _prompts_a_token_short, faults.no_prefix)
        | {f"a missing token, {loss}": (faults.without_a_result, dict(loss_type=loss)) for loss in ("sigmoid", "ipo")},
        verified={"as it is": (dict(max_steps=2), 2)},
        ranks=({}, FULL),
    )
]
