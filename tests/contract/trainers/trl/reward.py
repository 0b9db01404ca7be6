"""TRL's RewardTrainer."""

from trl import RewardTrainer

from tests.contract.harness import Harness, sabotaged_by, with_dropout
from tests.support import faults
from tests.support.models.families import FUSED, STOCK, kind
from tests.support.trl.dpo import pairs
from tests.support.trl.reward import CLASSIFIERS, REWARD, adapter, has_classifier, reward_model, train_both_rewards

WITHOUT_DROPOUT = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def with_margins(n: int) -> list[dict]:
    return [{**row, "margin": 0.1 * i} for i, row in enumerate(pairs(n))]


def implicit_prompts(n: int) -> list[dict]:
    return [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in pairs(n)]


FULL = dict(policy=3)


class SquaredScores(RewardTrainer):
    """A loss of its own, which is computed from fused calls, too."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs, use_cache=False).logits.square().mean()


def spread(prediction) -> dict[str, float]:
    assert prediction.predictions.shape[1:] == (1,)
    return {"spread": float(prediction.predictions.std())}


OPTIONS = {
    "explicit_prompts": (dict(), FULL),
    "implicit_prompts": (dict(data=implicit_prompts(16)), FULL),
    "margins": (dict(data=with_margins(16)), FULL),
    "centered": (dict(center_rewards_coefficient=0.3), FULL),
    "evaluation": (dict(evaluate=6), dict(policy=3, eval=2)),
    "metrics of scores": (dict(evaluate=6, compute_metrics=spread), dict(policy=3, eval=2)),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4)),
    "batch_of_one": (dict(per_device_train_batch_size=1), FULL),
    "last_batch_is_partial": (dict(per_device_train_batch_size=6), FULL),
    "filtered": (dict(max_length=14), FULL),
    "pad_to_multiple_of": (dict(pad_to_multiple_of=16), FULL),
    "padding_is_end": (dict(pad_token="<eos>"), FULL),  # the score is that of the token before the end
    "adapter": (dict(evaluate=4, **adapter()), dict(policy=3, eval=1)),  # PEFT trains and saves `score`
    "adapter_without_score": (adapter(task_type=None), FULL),
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "checkpointing_adapter": (dict(gradient_checkpointing=True, **adapter()), FULL),
    "squared scores": (dict(trainer_class=SquaredScores), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=1)),
}


def doubled(model):
    """Its class computes other scores than its layer."""
    stock = type(model).forward

    class Doubled(type(model)):
        def forward(self, *args, **kwargs):
            output = stock(self, *args, **kwargs)
            output.logits = 2 * output.logits
            return output

    model.__class__ = Doubled
    return model


def families(*names: str) -> dict[str, dict]:
    return {
        name: dict(kind=kind(name), tiny=FUSED[name][1] | (WITHOUT_DROPOUT if name == "gpt2" else {})) for name in names
    }


STOCK_CALLS = {("policy", "stock"): 3}
HARNESS = Harness(
    **REWARD.for_harness() | dict(models=lambda: [reward_model()]),
    both=train_both_rewards,
    options=OPTIONS,
    thorough=frozenset(),
    families=families(*CLASSIFIERS),
    fallbacks={
        **with_dropout(STOCK_CALLS, disable_dropout=False),
        "other scores": (dict(prepare=doubled), STOCK_CALLS, "Doubled computes other scores than its layer `score`"),
        **{
            name: (dict(kind=kind(name), tiny=STOCK[name][1], max_steps=2), {("policy", "stock"): 2}, STOCK[name][0])
            for name in filter(has_classifier, STOCK)
        },
    },
    sabotages=sabotaged_by(faults.targets_off_by_one, faults.late_positions, faults.no_prefix),
    verified={"as it is": (dict(evaluate=4), 1)},
    scores="rewards",
    ranks=(dict(evaluate=4), dict(policy=3, eval=1)),
)
HARNESSES = [HARNESS]
