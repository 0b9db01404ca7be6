"""OpenRLHF's DPOTrainer with its real actor and dataset."""

from openrlhf_runs import Recorded, Strategy, assert_same, checkpoint, rows
from openrlhf_runs import train as train_models

import fastdpo
from tests.contract.harness import Harness, Newer, bypassed, in_each_layout, repeated
from tests.support import faults
from tests.support.comparison import double

MOE = dict(num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.1)
ADAPTER = dict(lora_rank=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
PACKING = {"padded": dict(packing=False), "packing_samples": dict(packing=True)}


def train(directory, kind="llama", packing=False, tiny=None, loss=None, **options):
    """`loss` are fields of the arguments' namespace `model`."""
    paths = [checkpoint(directory, kind, seed, **(tiny or {})) for seed in range(2)]
    return train_models(*paths, Strategy(packing, **(loss or {})), **options)


def both(directory, **options):
    stock = train(directory, **options)
    stock.in_float64 = lambda: train(directory, cast=double, **options)
    if "nll_loss_coef" in options.get("loss", {}):
        assert "nll_loss" in stock.logs[0]
    with fastdpo.patched("openrlhf"):
        return stock, train(directory, **options)


OPTIONS = {
    "as it is": dict(),
    "ipo": dict(loss=dict(ipo_enable=True)),
    "label smoothing": dict(loss=dict(label_smoothing=0.2)),
    "nll": dict(loss=dict(nll_loss_coef=0.5)),
    "router": dict(kind="mixtral", tiny=MOE, loss=dict(aux_loss_coef=0.5)),
    "router, unused": dict(kind="mixtral", tiny=MOE),
    "adapter": ADAPTER,
    "eager": dict(attention="eager"),
    "temperature": dict(temperature=1.7),
    "qwen3": dict(kind="qwen3", tiny=dict(head_dim=8)),
    "two epochs": dict(epochs=2),
}


class OwnForward(Recorded):
    def concatenated_forward(self, model, chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens):
        return forward_of_its_own(model, chosen_ids, reject_ids)


def forward_of_its_own(model, *halves):
    logps = [model.model(ids).logits.log_softmax(-1).mean((1, 2)) for ids in halves]
    return *logps, [], -logps[0].mean()


def in_epochs(options: dict) -> dict[str, int]:
    return dict.fromkeys(("policy", "reference"), 3 * options.get("epochs", 1))


class DoublesLogps(Recorded):
    """Changes the results of the trainer's forward pass."""

    def concatenated_forward(self, model, *batch):
        chosen, rejected, aux_loss, nll_loss = super().concatenated_forward(model, *batch)
        return 2 * chosen, rejected, aux_loss, nll_loss


IN_LAYOUTS = in_each_layout({name: (x, in_epochs(x)) for name, x in OPTIONS.items()}, PACKING)
BLOOM = dict(without=("num_key_value_heads", "intermediate_size", "max_position_embeddings"), n_layer=2)
NAME = "openrlhf.DPOTrainer"
TRAINER, ACTOR = "trainer/dpo_trainer.py", "models/actor.py"
LOSS, SCALED = "                    preference_loss\n", "                    1.5 * preference_loss\n"
EVALUATION = '                "acc_mean": acc_sum / num_samples,\n'
LABELS = "        log_probs = log_probs_from_logits(output"
COPIES = {
    "unchanged": [],
    "another loss": [(TRAINER, LOSS, SCALED), (TRAINER, EVALUATION, f'{EVALUATION}                "one": 1.0,\n')],
    "other positions": [(TRAINER, "mask[:source_len] = False", "mask[: source_len + 1] = False")],
    "another actor": [(ACTOR, LABELS, LABELS.replace("(output", "(1.25 * output"))],
}
NEWER = f"{NAME} (0.12.0): on"
OFF = f"{NAME} (0.12.0): off, it is newer than the tested versions, and its code differs in "
REPORTS = {
    "unchanged": NEWER,
    "another loss": NEWER,
    "other positions": f"{OFF}openrlhf.trainer.dpo_trainer.DPOTrainer._get_batch_logps [changed-code]",
    "another actor": f"{OFF}openrlhf.models.actor.Actor.forward [changed-code]",
}

HARNESSES = [
    Harness(
        name=NAME,
        calls=dict(policy=1, reference=1),
        train=train,
        both=both,
        assert_same=assert_same,
        assert_same_bits=assert_same,
        one_step=dict(data=rows(4)),
        thorough=repeated(IN_LAYOUTS),
        options={
            **IN_LAYOUTS,
            "evaluation": (dict(evaluate=6), dict(policy=3, reference=3 + 2, eval=2)),
            "doubled": (dict(trainer_class=DoublesLogps), in_epochs({})),
        },
        fallbacks={
            "an unsupported model": (
                dict(kind="bloom", tiny=BLOOM, attention="eager"),
                {("policy", "stock"): 3, ("reference", "stock"): 3},
                "",
            )
        },
        bypassing=bypassed(OwnForward, "concatenated_forward"),
        sabotages={
            f"a missing token, {name}": (faults.without_a_result, dict(loss=loss))
            for name, loss in {"sigmoid": {}, "ipo": dict(ipo_enable=True)}.items()
        },
        verified={layout: (packing, 2) for layout, packing in PACKING.items()},
        newer=Newer(version="0.12.0", copies=COPIES, reports=REPORTS, recorded="openrlhf.models.actor."),
    )
]
