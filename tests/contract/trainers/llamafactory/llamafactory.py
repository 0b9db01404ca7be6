"""LLaMA-Factory's stages of DPO, of KTO and of reward models, by its own `run_exp`."""

import functools

from llamafactory_runs import FUSED, LORA, STOCK_CALLS, assert_same, assert_stock, checkpoint, train_both
from llamafactory_runs import train as train_checkpoint

from tests.contract.harness import Harness, Newer
from tests.support import faults

WITHOUT_DROPOUT = dict(summary_dropout_prob=0.0)
"""The value head of a reward model has dropout, which a fused training draws for the last tokens alone."""
OPTIONS_OF_DPO = {
    "as it is": {},
    "label smoothing": dict(dpo_label_smoothing=0.2),
    "hinge": dict(pref_loss="hinge"),
    "ipo": dict(pref_loss="ipo"),
    "kto_pair": dict(pref_loss="kto_pair"),
    "ftx": dict(pref_ftx=0.5),
    "bco": dict(pref_bco_weight=0.5),
    "ipo and ftx": dict(pref_loss="ipo", pref_ftx=0.5),
    "ld_alpha": dict(ld_alpha=0.3),
    "beta": dict(pref_beta=0.05),  # the tolerance of rewards is proportional to beta
    "lora": LORA,
    "dora": dict(**LORA, use_dora=True),
    "rslora and dropout": dict(**LORA, use_rslora=True, lora_dropout=0.3),
    "lora and ld_alpha": dict(**LORA, ld_alpha=0.3),
    "freeze": dict(finetuning_type="freeze", freeze_trainable_layers=1),
    "without checkpointing": dict(disable_gradient_checkpointing=True),
    "checkpointing that is not reentrant": dict(use_reentrant_gc=False),
    "eager": dict(flash_attn="disabled"),
    "cut off": dict(cutoff_len=8),
    "qwen3": dict(kind="qwen3"),
    "gemma2": dict(kind="gemma2", flash_attn="disabled"),
}
WITHOUT_REFERENCE = {"orpo": dict(pref_loss="orpo"), "simpo": dict(pref_loss="simpo", simpo_gamma=0.7, pref_beta=2.0)}
OPTIONS_OF_KTO = {
    "as it is": {},
    "weights": dict(kto_chosen_weight=0.5, kto_rejected_weight=2.0),
    "ftx": dict(pref_ftx=0.5),
    "beta": dict(pref_beta=0.05),  # the tolerance of rewards is proportional to beta
    "lora": LORA,
    "an odd batch": dict(per_device_train_batch_size=3),
    "one row": dict(per_device_train_batch_size=1),
    "cut off": dict(cutoff_len=8),
    "accumulation": dict(gradient_accumulation_steps=2, per_device_train_batch_size=2),
}
OPTIONS_OF_REWARDS = {
    "as it is": {},
    "lora": LORA,
    "freeze": dict(finetuning_type="freeze", freeze_trainable_layers=1),
    "accumulation": dict(gradient_accumulation_steps=2, per_device_train_batch_size=2),
    "one pair": dict(per_device_train_batch_size=1),
    "checkpointing that is not reentrant": dict(use_reentrant_gc=False),
    "qwen3": dict(kind="qwen3"),
}
BLOOM = dict(
    kind="bloom",
    flash_attn="disabled",
    tiny=dict(n_layer=2, num_key_value_heads=None, intermediate_size=None, max_position_embeddings=None, head_dim=None),
)
NOT_SET = "does not let its attention implementation be set"


def train(directory, stage, tiny=None, **options):
    directory.mkdir(exist_ok=True, parents=True)
    return train_checkpoint(directory, checkpoint(directory, **(tiny or {})), stage, **options)


def train_rewards_both(directory, tiny=None, **options):
    return train_both(directory, "rm", tiny=WITHOUT_DROPOUT | (tiny or {}), **options)


def harness(stage: str, options: dict, evaluated: dict, both=None, **attributes) -> Harness:
    calls = {role: n for (role, _), n in FUSED[stage].items()}
    fused = {name: (x, counted(calls, x)) for name, x in options.items()}
    return Harness(
        calls={role: n // 3 for role, n in calls.items()},
        train=functools.partial(train, stage=stage),
        both=both or functools.partial(train_both, stage=stage),
        assert_same=assert_same,
        assert_same_bits=assert_stock,
        options=fused | {name: (dict(evaluate=True, **x), calls | evaluated) for name, x in EVALUATED[stage].items()},
        far=False,
        **attributes,
    )


EVALUATED = {"dpo": {"evaluation": {}}, "kto": {"evaluation": {}, "evaluation, lora": LORA}, "rm": {"evaluation": {}}}


def counted(calls: dict, options: dict) -> dict[str, int]:
    """The calls of three steps. LLaMA-Factory's losses without a reference call none."""
    batches = options.get("gradient_accumulation_steps", 1)
    return {
        role: n * batches
        for role, n in calls.items()
        if role != "reference" or options.get("pref_loss") not in ("orpo", "simpo")
    }


NAME = "llamafactory.DPOTrainer"
TRAINER, UTILS = "train/dpo/trainer.py", "train/trainer_utils.py"
AFTER_THE_LOSS = "            if self.bco_gemma > 1e-6:\n"
COPIES = {
    "unchanged": [],
    "another loss": [(TRAINER, AFTER_THE_LOSS, f"            losses = 1.5 * losses\n{AFTER_THE_LOSS}")],
    "other positions": [(UTILS, "labels = labels[:, 1:]", "labels = labels[:, :-1]")],
    "logits in the loss": [(TRAINER, "return losses.mean(), ", "return losses.mean() + policy_chosen_logits.mean(), ")],
}
NEWER = f"{NAME} (0.9.6): on"
OFF = f"{NAME} (0.9.6): off, it is newer than the tested versions, and its code differs in "
REPORTS = {
    "unchanged": NEWER,
    "another loss": NEWER,
    "other positions": f"{OFF}llamafactory.train.dpo.trainer.get_batch_logps [changed-code]",
    "logits in the loss": f"{OFF}llamafactory.train.dpo.trainer.CustomDPOTrainer.get_batch_loss_metrics [changed-code]",
}
OF_BOTH = {"an unsupported model": BLOOM, "labels at padding": dict(ignore_pad_token_for_loss=False)}
REASONS = {"an unsupported model": NOT_SET, "labels at padding": "a label is scored by a padding position"}
LOST = {"a token that is not scored": (faults.without_a_result, {})}
HARNESSES = [
    harness(
        "dpo",
        OPTIONS_OF_DPO | WITHOUT_REFERENCE | {f"{name}, lora": x | LORA for name, x in WITHOUT_REFERENCE.items()},
        dict(policy=3, reference=6, eval=3),
        name=NAME,
        fallbacks={name: (x, STOCK_CALLS["dpo"], REASONS[name]) for name, x in OF_BOTH.items()},
        sabotages=LOST,
        verified={"as it is": ({}, 2), "simpo": (dict(pref_loss="simpo"), 1)},
        newer=Newer(version="0.9.6", copies=COPIES, reports=REPORTS, recorded="llamafactory.train.kto."),
    ),
    harness(
        "kto",
        OPTIONS_OF_KTO,
        dict(reference=6, eval=3),
        name="llamafactory.KTOTrainer",
        fallbacks={
            "an unsupported model": (BLOOM, STOCK_CALLS["kto"], NOT_SET),
            "labels at padding": (
                OF_BOTH["labels at padding"],
                {("policy", "stock"): 6, ("reference", "stock"): 3},
                REASONS["labels at padding"],
            ),
        },
        sabotages=LOST,
        verified={"as it is": ({}, 3)},
    ),
    harness(
        "rm",
        OPTIONS_OF_REWARDS,
        dict(eval=3),
        train_rewards_both,
        name="llamafactory.PairwiseTrainer",
        fallbacks={"an unsupported model": (BLOOM, STOCK_CALLS["rm"], "")},
        verified={"as it is": (dict(evaluate=True), 1)},
        scores="hidden states",
    ),
]
