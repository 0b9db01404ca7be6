"""ms-swift's trainers in one process: every option that changes their computations."""

import functools

from fastdpo.integrations.swift import batches
from tests.contract.harness import Harness, Newer, in_each_layout, repeated
from tests.support import faults
from tests.support.comparison import assert_same
from tests.support.programs.swift_runs import (
    LORA,
    PACKING,
    join_rows,
    join_rows_and_scale_logits,
    scale_logits,
    train,
    train_both,
)

FULL = dict(policy=3, reference=3)
LOSSES = (
    *("sigmoid", "hinge", "ipo", "bco_pair", "sppo_hard", "nca_pair", "aot", "aot_unpaired", "apo_zero", "apo_down"),
    *("discopop", "sft"),
)
LAYOUTS = {"padded": {}, "padding_free": dict(prepare=join_rows)}


def pad_left(pipeline) -> None:
    pipeline.template.padding_side = "left"


def set_on_trainer(**attributes):
    """Sets what the command has no option for."""
    return lambda trainer: vars(trainer).update(attributes)


# option: (changed arguments, number of calls of each kind)
OPTIONS_OF_DPO = {
    "lora": (LORA, FULL),
    "ld": (dict(ld_alpha=0.5), FULL),
    "ld_rpo": (dict(ld_alpha=0.3, rpo_alpha=0.7), FULL),
    "rpo_ipo": (dict(rpo_alpha=0.7, loss_type="ipo"), FULL),
    "smoothed": (dict(label_smoothing=0.2), FULL),
    "smoothed_robust": (dict(label_smoothing=0.1, loss_type="robust"), FULL),
    "smoothed_exo_pair": (dict(label_smoothing=1e-3, loss_type="exo_pair"), FULL),
    "two_losses": (dict(before_training=set_on_trainer(loss_type=["sigmoid", "ipo"], loss_weights=[1.0, 0.5])), FULL),
    "js_divergence": (dict(before_training=set_on_trainer(f_divergence_type="js_divergence")), FULL),
    "reference_free": (dict(before_training=set_on_trainer(reference_free=True)), FULL),
    "all_logits": (dict(use_logits_to_keep=False), FULL),
    "truncated": (dict(max_length=18, truncation_strategy="left"), FULL),
    "evaluation": (
        dict(split_dataset_ratio=0.34, eval_steps=3, per_device_eval_batch_size=3),
        dict(policy=3, reference=3 + 2, eval=2),
    ),
    "accumulation": (dict(gradient_accumulation_steps=2), dict(policy=5, reference=5)),  # an epoch has 3 batches
    "no_checkpointing": (dict(gradient_checkpointing=False), FULL),
}
FULL_KTO = dict(policy=6, reference=3)  # the completions and the KL term of 3 steps
OPTIONS_OF_KTO = {
    "kto": ({}, FULL_KTO),
    "lora": (LORA, FULL_KTO),
    "weights": (dict(desirable_weight=2.0, undesirable_weight=0.5, beta=0.3), FULL_KTO),
    "apo_zero_unpaired": (dict(loss_type="apo_zero_unpaired"), dict(policy=3, reference=3)),
    "accumulation": (dict(gradient_accumulation_steps=3), dict(policy=18, reference=9)),
    "evaluation": (
        dict(split_dataset_ratio=0.34, eval_steps=3, per_device_eval_batch_size=4),
        dict(policy=6, reference=3 + 1, eval=1),
    ),
}
OPTIONS_WITHOUT_REFERENCE = {
    "cpo": ("cpo", {}),
    "cpo_hinge": ("cpo", dict(loss_type="hinge")),
    "cpo_ipo": ("cpo", dict(loss_type="ipo")),
    "cpo_without_nll": ("cpo", dict(cpo_alpha=0)),
    "cpo_lora": ("cpo", LORA),
    "simpo": ("simpo", {}),
    "simpo_with_nll": ("simpo", dict(cpo_alpha=0.5)),
    "simpo_lora": ("simpo", LORA),
    "orpo": ("orpo", {}),
    "orpo_lora": ("orpo", LORA),
}
OPTIONS_OF_REWARDS = {
    "centered": (dict(center_rewards_coefficient=0.3), 3),
    "accumulation": (dict(gradient_accumulation_steps=2), 5),  # an epoch has 3 batches
    "adapter": (LORA, 3),
}
EVALUATED = dict(split_dataset_ratio=0.34, eval_steps=3, per_device_eval_batch_size=4)
HOOKED = {"padded": scale_logits, "padding_free": join_rows_and_scale_logits}


def forget_tokens(of_completions: bool):
    """A fault: the patched trainer of KTO leaves out tokens of the completions, or of the KL term."""

    def plant(monkeypatch):
        seen = []

        def without_a_token(batch, **options):
            inputs = batches.inputs_of(batch, **options)
            seen.append(inputs)
            if len(seen) % 2 != of_completions:
                return inputs
            labels = inputs["labels"].clone()
            labels[:, :-3] = -100
            return {**inputs, "labels": labels}

        monkeypatch.setattr("fastdpo.integrations.swift.line.inputs_of", without_a_token)

    return plant


def without_means_of_logits(run):
    """Stock averages them over prompts and padding, too."""
    run.logs = [{name: x for name, x in log.items() if "logits/" not in name} for log in run.logs]
    return run


def train_both_without_means_of_logits(directory, kind, **options):
    stock, patched = train_both(directory, kind, **options)
    assert [log.keys() for log in stock.logs] == [log.keys() for log in patched.logs]
    if ("policy", "stock") in patched.calls:
        return stock, patched
    in_float64 = stock.in_float64
    stock.in_float64 = lambda: without_means_of_logits(in_float64())
    return without_means_of_logits(stock), without_means_of_logits(patched)


def harness(kind: str, both=train_both, **attributes) -> Harness:
    return Harness(
        train=functools.partial(train, kind=kind),
        both=functools.partial(both, kind=kind),
        assert_same_bits=assert_same,
        **attributes,
    )


def without_reference(kind: str, *kinds: str, **attributes) -> Harness:
    return harness(
        kind,
        train_both_without_means_of_logits,
        name=f"swift.{kind.upper()}Trainer",
        calls=dict(policy=1),
        options={
            **{
                name: (dict(kind=of_kind, **options), dict(policy=3))
                for name, (of_kind, options) in OPTIONS_WITHOUT_REFERENCE.items()
                if of_kind in kinds
            },
            "evaluation": (EVALUATED, dict(policy=3, eval=1)),
        },
        fallbacks={"a head with hooks": (dict(prepare=scale_logits), {("policy", "stock"): 3}, "the head has hooks")},
        sabotages={"a missing token": (faults.without_a_result, dict(kind=kinds[-1]))},
        verified={"padded": (dict(max_steps=2), 1)},
        **attributes,
    )


NAME = "swift.DPOTrainer"
TRAINER, MIXIN = "rlhf_trainers/dpo_trainer.py", "rlhf_trainers/rlhf_mixin.py"
MASK = "loss_mask = labels != label_pad_token_id\n"
OTHER_MASK = "loss_mask = (labels != label_pad_token_id) & (torch.arange(labels.shape[1]) % 2 == 0)\n"
COPIES = {
    "unchanged": [],
    "another loss": [(TRAINER, "return losses, chosen_rewards, ", "return 1.5 * losses, chosen_rewards, ")],
    "other positions": [(MIXIN, MASK, OTHER_MASK)],
}
NEWER = f"{NAME} (4.7.0): on"
REPORTS = {
    "unchanged": NEWER,
    "another loss": NEWER,
    "other positions": f"{NAME} (4.7.0): off, it is newer than the tested versions, and its code differs in "
    "swift.rlhf_trainers.dpo_trainer.DPOTrainer.get_per_token_logps [changed-code]",
}
LOSSES_OF_DPO = {f"loss {x}": (dict(loss_type=x, max_steps=2), dict(policy=2, reference=2)) for x in LOSSES}
IN_LAYOUTS_OF_DPO = in_each_layout(LOSSES_OF_DPO | OPTIONS_OF_DPO, LAYOUTS)
IN_LAYOUTS_OF_KTO = in_each_layout(OPTIONS_OF_KTO, LAYOUTS)
ALL_STOCK = {("policy", "stock"): 3, ("reference", "stock"): 3}
HARNESSES = [
    harness(
        "dpo",
        name=NAME,
        calls=dict(policy=1, reference=1),
        thorough=repeated(IN_LAYOUTS_OF_DPO),
        options={
            **IN_LAYOUTS_OF_DPO,
            "packing": (dict(**PACKING, max_steps=3, per_device_train_batch_size=1), FULL),
            "packing and accumulation": (
                dict(**PACKING, max_steps=1, gradient_accumulation_steps=3, per_device_train_batch_size=1),
                FULL,
            ),
            "padded on the left": (dict(prepare=pad_left), FULL),
        },
        fallbacks={
            f"a head with hooks, {layout}": (dict(prepare=prepare), ALL_STOCK, "the head has hooks")
            for layout, prepare in HOOKED.items()
        },
        sabotages={
            f"a missing token, {layout}": (faults.without_a_result, prepared) for layout, prepared in LAYOUTS.items()
        },
        verified={layout: (dict(max_steps=2, **prepared), 2) for layout, prepared in LAYOUTS.items()},
        newer=Newer(version="4.7.0", copies=COPIES, reports=REPORTS, recorded="swift.rlhf_trainers.kto_trainer."),
    ),
    harness(
        "kto",
        name="swift.KTOTrainer",
        calls=dict(policy=2, reference=1),
        thorough=repeated(IN_LAYOUTS_OF_KTO),
        options={**IN_LAYOUTS_OF_KTO, "packing": (dict(**PACKING, per_device_train_batch_size=2), FULL_KTO)},
        fallbacks={
            f"a head with hooks, {layout}": (
                dict(prepare=prepare),
                {("policy", "stock"): 6, ("reference", "stock"): 6},
                "the head has hooks",
            )
            for layout, prepare in HOOKED.items()
        },
        sabotages={
            "missing tokens of completions": (forget_tokens(True), {}),
            "missing tokens of the KL term": (forget_tokens(False), dict(max_steps=3)),
        },
        verified={layout: (dict(max_steps=2, **prepared), 3) for layout, prepared in LAYOUTS.items()},
    ),
    without_reference("cpo", "cpo", "simpo"),
    without_reference("orpo", "orpo"),
    harness(
        "rm",
        name="swift.RewardTrainer",
        calls=dict(policy=1),
        options={name: (options, dict(policy=calls)) for name, (options, calls) in OPTIONS_OF_REWARDS.items()},
    ),
]
