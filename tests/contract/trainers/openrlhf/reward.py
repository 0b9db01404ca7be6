"""OpenRLHF's RewardModelTrainer with its real model and dataset."""

from openrlhf_runs import RecordedRewards, Strategy, assert_same, checkpoint, train_rewards

import fastdpo
from tests.contract.harness import Harness, bypassed, in_each_layout, repeated
from tests.support.comparison import double

ADAPTER = dict(lora_rank=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
PACKING = {"padded": dict(packing=False), "packing_samples": dict(packing=True)}


def train(directory, kind="llama", packing=False, tiny=None, model=None, **options):
    """`model` are fields of the arguments' namespace of this name."""
    return train_rewards(checkpoint(directory, kind, **(tiny or {})), Strategy(packing, **(model or {})), **options)


def both(directory, **options):
    stock = train(directory, **options)
    stock.in_float64 = lambda: train(directory, cast=double, **options)
    with fastdpo.patched("openrlhf"):
        return stock, train(directory, **options)


OPTIONS = {
    "as it is": dict(),
    "margins": dict(model=dict(margin_loss_enable=True)),
    "logexp": dict(loss="logexp", model=dict(compute_fp32_loss_enable=True)),
    "adapter": ADAPTER,
    "another head": dict(value_head_prefix="value"),
    "padding that is the end": dict(padding="<eos>"),
    "checkpointing": dict(checkpointing=True),
    "absolute positions": dict(kind="gpt2", tiny=dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)),
    "router": dict(kind="mixtral", tiny=dict(num_local_experts=4, num_experts_per_tok=2)),
}


class OwnForward(RecordedRewards):
    def concatenated_forward(self, model, *batch):
        ids, mask = self.concatenated_inputs(*batch)
        return *model(ids, attention_mask=mask).chunk(2), []


IN_LAYOUTS = in_each_layout({name: (x, dict(policy=3)) for name, x in OPTIONS.items()}, PACKING)
HARNESSES = [
    Harness(
        name="openrlhf.RewardModelTrainer",
        calls=dict(policy=1),
        train=train,
        both=both,
        assert_same=assert_same,
        assert_same_bits=assert_same,
        thorough=repeated(IN_LAYOUTS),
        options={**IN_LAYOUTS, "evaluation": (dict(evaluate=6), dict(policy=3, eval=2))},
        bypassing=bypassed(OwnForward, "concatenated_forward"),
        verified={layout: (dict(evaluate=6, **packing), 1) for layout, packing in PACKING.items()},
        scores="rewards",
    )
]
