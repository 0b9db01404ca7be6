"""TRL's GRPOTrainer and RLOOTrainer, as far as they are alike."""

import functools

from peft import LoraConfig, PromptTuningConfig
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer

from fastdpo import packing
from tests.contract.harness import Harness, bypassed, sabotaged_by, with_dropout
from tests.support import faults
from tests.support.trl.dpo import LORA, trained_adapter
from tests.support.trl.groups import (
    AGAIN,
    CLIPPED,
    NAMES,
    SCORED_BEFORE,
    assert_same_groups,
    build_group,
    train_both_groups,
    train_group,
)
from tests.support.trl.online import reward_model, writer

NO_END = dict(generation_kwargs={"suppress_tokens": list(range(1, 21))})
ONCE = dict(policy=3)
WITHOUT_REFERENCE = {**SCORED_BEFORE, "reference": 0}
EAGER = dict(tiny=dict(attn_implementation="eager"))
GPT2 = dict(without=("head_dim", "num_key_value_heads", "intermediate_size"))
SPLIT = {"policy": 3, "old_policy": 4}
"""The 12 completions of two prompts are scored in batches of 3."""
OF_BOTH = {
    # positions count the padding of a prompt
    "learned positions": (dict(kind="gpt2", tiny=GPT2, disable_dropout=True, **CLIPPED), SCORED_BEFORE),
    "router loss": (
        dict(
            **dict(kind="mixtral", tiny=dict(num_local_experts=4, num_experts_per_tok=2), reference=False),
            **dict(**AGAIN, beta=0.0, router_aux_loss_coef=0.1),
        ),
        WITHOUT_REFERENCE,
    ),
}
BATCHES_OF_FOUR = dict(per_device_train_batch_size=4, per_device_eval_batch_size=4)
EACH_ONCE = {"policy": 3, "old_policy": 3, "reference": 3}
EACH_TWICE = {"policy": 4, "old_policy": 4, "reference": 4}
"""Two steps of two batches."""
SPLIT_IN_RLOO = SPLIT | {"reference": 4}


REENTRANT = {
    name: dict(gradient_checkpointing_kwargs={"use_reentrant": name == "reentrant"})
    for name in ("reentrant", "non-reentrant")
}


def environment(asked, trainer):
    """Generates completions of the trainer, of which some tokens come from an environment."""
    ids, _, _ = trainer._tokenize_prompts(asked)
    completions, _ = trainer._generate_single_turn(ids, None, {}, trainer.num_generations)
    masks = [[int(i % 3 != 1) for i in range(len(completion))] for completion in completions]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}


OPTIONS_OF_GRPO = {
    **OF_BOTH,
    "reward model": (dict(reward_model=reward_model, max_steps=2), dict(policy=2, reward=2)),
    "as it is": (dict(), ONCE),
    "eager attention": (EAGER, ONCE),
    "reference": (dict(beta=0.1), dict(policy=3, reference=3)),
    "clipped": (CLIPPED, SCORED_BEFORE),
    "sequence ratios": (dict(**CLIPPED, importance_sampling_level="sequence", loss_type="grpo"), SCORED_BEFORE),
    "two-sided clipping": (dict(**AGAIN, delta=1.5), WITHOUT_REFERENCE),
    "off-policy mask": (dict(**AGAIN, off_policy_mask_threshold=0.05), WITHOUT_REFERENCE),
    "kl without correction": (dict(**CLIPPED, use_bias_correction_kl=False), SCORED_BEFORE),
    # entropy
    # Small steps: rounding must not decide which tokens have the highest entropies.
    "high entropy": (dict(**AGAIN | {"learning_rate": 0.1}, top_entropy_quantile=0.35), WITHOUT_REFERENCE),
    "entropy bonus": (dict(entropy_coef=0.3), ONCE),
    "adaptive entropy": (dict(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=10.0), ONCE),
    "temperature": (dict(**CLIPPED, temperature=0.7), SCORED_BEFORE),
    # completions
    "no end": (dict(beta=0.1, **NO_END), dict(policy=3, reference=3)),
    "one token": (dict(beta=0.1, max_completion_length=1), dict(policy=3, reference=3)),
    "truncated completions": (dict(**CLIPPED, mask_truncated_completions=True), SCORED_BEFORE),
    "only truncated completions": (dict(**CLIPPED, **NO_END, mask_truncated_completions=True), SCORED_BEFORE),
    "environment": (dict(**CLIPPED, rollout_func=environment), SCORED_BEFORE),
    "equal completions": (dict(beta=0.1, top_k=1), dict(policy=3, reference=3)),
    "padded to a multiple": (dict(pad_to_multiple_of=16), ONCE),
    # reference
    "adapter": (dict(**CLIPPED, reference=False, peft_config=LoraConfig(**LORA)), SCORED_BEFORE),
    "loaded adapter": (dict(**CLIPPED, reference=False, prepare=trained_adapter), SCORED_BEFORE),  # TRL copies it
    "reference follows": (dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1), dict(policy=3, reference=3)),
    # batches and memory
    "split groups": (dict(per_device_train_batch_size=3, num_generations=6, steps_per_generation=4), SPLIT),
    "accumulation": (dict(gradient_accumulation_steps=2, steps_per_generation=2, max_steps=2), dict(policy=4)),
    "evaluation": (dict(beta=0.1, evaluate=3), dict(policy=3, reference=3 + 3, eval=3)),
    "checkpointing": (dict(**CLIPPED, gradient_checkpointing=True), SCORED_BEFORE),
    **{
        f"{name} checkpointing of an adapter": (
            dict(**CLIPPED, **options, gradient_checkpointing=True, reference=False, peft_config=LoraConfig(**LORA)),
            SCORED_BEFORE,
        )
        for name, options in REENTRANT.items()
    },
    "GMPO": (dict(**CLIPPED, trainer_class=GMPOTrainer), SCORED_BEFORE),  # a loss of its own
    "float32 head": (dict(beta=0.1, cast_lm_head_to_fp32=True), dict(policy=3, reference=3)),
    # between the head and the logits
    "softcap": (dict(kind="gemma2", tiny=dict(query_pre_attn_scalar=8, final_logit_softcapping=3.0)), ONCE),
    "scaled logits": (dict(kind="granite", tiny=dict(logits_scaling=4.0)), ONCE),
    **{
        f"loss {name}": (dict(**CLIPPED, loss_type=name, seed=7), SCORED_BEFORE)
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
    },
}
OPTIONS_OF_RLOO = {
    **OF_BOTH,
    "reward model": (
        dict(reward_model=reward_model, max_steps=2),
        {"policy": 2, "old_policy": 2, "reference": 2, "reward": 2},
    ),
    "as it is": (dict(), EACH_ONCE),
    "eager attention": (EAGER, EACH_ONCE),
    "without a reference": (dict(beta=0.0), {"policy": 3, "old_policy": 3}),
    "clipped": (CLIPPED, SCORED_BEFORE),
    "normalized": (dict(normalize_advantages=True, reward_clip_range=(0.2, 0.7)), EACH_ONCE),
    "temperature": (dict(temperature=0.7), EACH_ONCE),
    "one token": (dict(max_completion_length=1), EACH_ONCE),
    "truncated completions": (dict(mask_truncated_completions=True), EACH_ONCE),
    "only truncated completions": (dict(**NO_END, mask_truncated_completions=True), EACH_ONCE),
    "adapter": (dict(**AGAIN, reference=False, peft_config=LoraConfig(**LORA)), SCORED_BEFORE),
    "accumulation": (dict(gradient_accumulation_steps=2, steps_per_generation=2, max_steps=2), EACH_TWICE),
    "split groups": (dict(per_device_train_batch_size=3, num_generations=6, steps_per_generation=4), SPLIT_IN_RLOO),
    "evaluation": (dict(evaluate=3), {"policy": 3, "old_policy": 3, "reference": 3 + 3, "eval": 2 * 3}),
    "checkpointing": (dict(gradient_checkpointing=True), EACH_ONCE),
}


def _positions_start_at_1(monkeypatch):
    stock = packing.make_layout

    def make_layout(*args, **kwargs):
        layout = stock(*args, **kwargs)
        layout.position_ids[layout.position_ids.argmax() :] += 1
        return layout

    monkeypatch.setattr(packing, "make_layout", make_layout)


class OwnScores:
    """Mixed into a trainer, it computes log-probabilities of its own."""

    def _get_per_token_logps_and_entropies(self, model, ids, mask, width, *args, **options):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
        logps = logits.log_softmax(-1)
        entropies = -(logps.exp() * logps).sum(-1)
        return logps.gather(2, ids[:, -width:, None])[..., 0], entropies, None


TUNING = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
FALLEN_BACK = {("policy", "stock"): 4, ("old_policy", "stock"): 2, ("reference", "fused"): 2}


def harness(trainer_class: type, **attributes) -> Harness:
    def build(directory, model, reference=None, **options):
        return build_group(directory, model, **{"trainer_class": trainer_class, "reference": reference, **options})

    def train(directory, model, reference=None, **options):
        return train_group(directory, model, **{"trainer_class": trainer_class, "reference": reference, **options})

    return Harness(
        name=NAMES[trainer_class],
        train=train,
        build=build,
        both=functools.partial(train_both_groups, trainer_class=trainer_class),
        models=lambda: [writer(seed) for seed in range(2)],
        one_step=dict(max_steps=1, beta=0.1),
        assert_same=assert_same_groups,
        assert_same_bits=assert_same_groups,
        bypassing=bypassed(
            type("Own", (OwnScores, trainer_class), {}),
            *("_compute_loss", "_get_per_token_logps_and_entropies"),
            name="Recorded",
            beta=0.0,
        ),
        strict=(dict(peft_config=TUNING, beta=0.0), "without input_ids"),
        sabotages=sabotaged_by(
            *(faults.results_a_token_late, faults.no_prefix, faults.another_prompt, _positions_start_at_1),
            faults.without_a_result,
        ),
        far=False,
        ranks=(
            dict(**CLIPPED, **BATCHES_OF_FOUR, reference=False, peft_config=LoraConfig(**LORA), evaluate=4),
            SCORED_BEFORE | {"reference": 2 + 2, "eval": 2 * 2},
        ),
        **attributes,
    )


DROPOUT = with_dropout(FALLEN_BACK, **CLIPPED)
HARNESSES = [
    harness(
        GRPOTrainer,
        calls=dict(policy=1, reference=1),
        seams=("trl.trainer.grpo_trainer.add_fused_lm_head",),
        options=OPTIONS_OF_GRPO,
        fallbacks=DROPOUT
        | {
            "prompt tuning": (
                dict(**CLIPPED, reference=False, peft_config=TUNING),
                FALLEN_BACK,
                "the model was called without input_ids",
            )
        },
        verified={"as it is": (dict(steps_per_generation=2, num_iterations=2, max_steps=2), 2)},
    ),
    harness(
        RLOOTrainer,
        calls=dict(policy=1, old_policy=1, reference=1),
        seams=("trl.trainer.rloo_trainer.add_fused_lm_head",),
        options=OPTIONS_OF_RLOO,
        fallbacks=DROPOUT,
        verified={"as it is": (dict(max_steps=2), 3)},
    ),
]
