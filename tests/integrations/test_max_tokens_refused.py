"""What `patch(max_tokens=...)` refuses, before or within a training, with the reason."""

import pytest
import torch
from accelerate import Accelerator
from peft import PromptTuningConfig, TaskType

import fastdpo
from fastdpo.integrations.trl.sft import SFTLine
from tests.integrations.test_trl_budget import CLASSES, TUNING
from tests.support.models.families import DYNAMIC, FUSED
from tests.support.trl.dpo import tiny_model, train
from tests.support.workers.budgets import (
    DPO,
    GRPO,
    KTO,
    MAX_TOKENS,
    REWARD,
    RLOO,
    SFT,
    TPO,
    TRAINERS,
    trained,
)


def overriding(trainer_class: type, name: str) -> type:
    """A subclass with a loss function of its own, which calls that of its class, or with steps that do nothing."""

    def own(self, *args, **kwargs):
        return torch.zeros(()) if name == "training_step" else getattr(trainer_class, name)(self, *args, **kwargs)

    return type("Own", (trainer_class,), {name: own})


def without_loss_arguments(model):
    model.accepts_loss_kwargs = False
    return model


LOSSES = "which overrides the loss of"
STEPS = "whose training_step does not call that of"
OVERRIDDEN = {
    SFT: ("compute_loss",),
    KTO: ("_compute_kl_logps", "training_step"),
    DPO: ("compute_loss", "compute_ref_log_probs", "training_step"),
    REWARD: ("compute_loss",),
    GRPO: ("training_step",),
    RLOO: ("_compute_loss",),
}
MIXTRAL = dict(kind="mixtral", **FUSED["mixtral"][1])
REFUSED = {
    "another mean": (SFT, dict(prepare=without_loss_arguments), "models whose loss does not take num_items_in_batch"),
    "prompt tuning": (
        REWARD,
        dict(peft_config=PromptTuningConfig(task_type=TaskType.SEQ_CLS, **TUNING)),
        "prompt tuning",
    ),
    "aot": (DPO, dict(loss_type="aot"), "loss_type='aot', which is not a mean over pairs"),
    "no reference completions": (TPO, dict(tpo_alpha=0.0), "tpo_alpha=0, with which batches have no reference"),
    "a reference without tokens": (TPO, dict(max_length=3), "reference completions that truncation has left nothing"),
    "sft": (DPO, dict(loss_type=["sigmoid", "sft"]), "loss_type='sft'"),
    "bnpo": (GRPO, dict(loss_type="bnpo"), "loss_type='bnpo', which depends on the batch of a row"),
    "entropy bonus": (GRPO, dict(entropy_coef=0.3), "an entropy bonus, which is a mean"),
    "quantile": (GRPO, dict(top_entropy_quantile=0.35), "top_entropy_quantile below 1"),
    **{
        f"rotary embeddings, {trainer}": (
            trainer,
            dict(tiny=dict(rope_parameters=DYNAMIC, max_position_embeddings=16)),
            "batches of up to [0-9]+ tokens, since .*; truncate by max_length",
        )
        for trainer in TRAINERS
    },
    **{
        f"router losses, {trainer}": (
            trainer,
            dict(tiny=MIXTRAL, router_aux_loss_coef=0.5),
            "the auxiliary loss of routers",
        )
        for trainer in (SFT, KTO, DPO)
    },
    **{
        f"{trainer}, {name}": (
            trainer,
            dict(trainer_class=overriding(CLASSES[trainer], name)),
            f"Own, {STEPS if name == 'training_step' else LOSSES} {CLASSES[trainer].__name__}",
        )
        for trainer, names in OVERRIDDEN.items()
        for name in names
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    trainer, options, message = REFUSED[case]
    fastdpo.patch(trainer, max_tokens=MAX_TOKENS[trainer])
    with pytest.raises(NotImplementedError, match=f"^patch: max_tokens does not support {message}"):
        trained(tmp_path, trainer, **options)


@pytest.mark.parametrize("options", [dict(accelerator_config={"even_batches": False}), dict(ddp_static_graph=True)])
def test_refused_on_several_ranks(tmp_path, monkeypatch, options):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    fastdpo.patch(DPO, max_tokens=MAX_TOKENS[DPO])
    with pytest.raises(NotImplementedError, match=r"does not support (even_batches=False|ddp_static_graph=True)"):
        trained(tmp_path, DPO, **options)


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(tmp_path):
    """Before it has stepped. It would step once for each micro-batch. Hooks that mask gradients are not refused."""
    model = tiny_model()
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient)
    fastdpo.patch(DPO, max_tokens=MAX_TOKENS[DPO])
    train(tmp_path, model, tiny_model(seed=1), max_steps=1)
    before = [x.clone() for x in model.parameters()]

    def step(x):
        x.data.add_(x.grad, alpha=-0.01)
        x.grad = None

    for x in model.parameters():
        x.register_post_accumulate_grad_hook(step)
    with pytest.raises(
        NotImplementedError, match=r"does not support optimizers that step in the backward pass, as .*step may do"
    ):
        train(tmp_path, model, tiny_model(seed=1), max_steps=1)
    assert all(map(torch.equal, before, model.parameters()))


def test_batches_with_other_entries_are_refused():
    batch = dict(input_ids=torch.ones(1, 2), attention_mask=torch.ones(1, 2), pixel_values=torch.ones(1, 3))
    with pytest.raises(NotImplementedError, match="does not support batches with pixel_values"):
        SFTLine(SFT, ("trl.trainer.sft_trainer",)).joined(None, [batch])
