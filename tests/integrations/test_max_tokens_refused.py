"""What `patch(max_tokens=...)` refuses, before or within a training, with the reason."""

import pytest
import torch
from accelerate import Accelerator
from peft import PromptTuningConfig, TaskType
from transformers import TrainerCallback
from trl import DPOTrainer

import fastdpo
from tests.integrations.test_trl_budget import CLASSES, TUNING, collating
from tests.support.comparison import double
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


class Capacity(torch.nn.Module):
    """A layer that leaves out the last tokens of a batch."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        n = x.shape[0] * x.shape[1]
        return self.layer(x) * (torch.arange(n) < 0.7 * n).view(*x.shape[:2], 1)


class Normalized(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.norm = layer, torch.nn.BatchNorm1d(layer.weight.numel()).double()

    def forward(self, x):
        return self.norm(self.layer(x).flatten(0, 1)).view_as(x)


def with_capacity(model):
    model.model.layers[0].mlp = Capacity(model.model.layers[0].mlp)
    return double(model)


def with_batch_norm(model):
    model.model.norm = Normalized(model.model.norm)
    return double(model)


def clipping(model):
    for x in model.parameters():
        x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return double(model)


def stepping(model):
    def step(x):
        x.data.add_(x.grad, alpha=-0.01)
        x.grad = None

    for x in model.parameters():
        x.register_post_accumulate_grad_hook(step)
    return double(model)


def hooked(model):
    model.register_forward_hook(lambda *args: None)
    return double(model)


def setting(name: str) -> type:
    """A subclass that sets a function of a trainer on the object, where it halves the loss."""

    class Setting(DPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            owner, stock = (
                (self.accelerator, self.accelerator.backward) if name == "backward" else (self, getattr(self, name))
            )

            def halved(*args, **kwargs):
                if name == "backward":
                    return stock(0.5 * args[0], *args[1:], **kwargs)
                loss = stock(*args, **kwargs)
                return (0.5 * loss[0], *loss[1:]) if isinstance(loss, tuple) else 0.5 * loss

            setattr(owner, name, halved)

    return Setting


class Reading(DPOTrainer):
    """A subclass that reads what a batch returns, and its metrics."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        assert loss > 0
        assert self._metrics["train"]["rewards/margins"][-1] is not None
        return loss


class Clips(TrainerCallback):
    def on_substep_end(self, args, state, control, model=None, **kwargs):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def of_object(name: str, set_as: str) -> tuple[str, dict, str]:
    return DPO, dict(trainer_class=setting(name)), rf"setting.*halved, set as {set_as}"


CODE = {
    "hooks that clip": (DPO, dict(prepare=clipping), "hooks of parameters, as clipping.* is one: it"),
    "hooks that step": (DPO, dict(prepare=stepping), "optimizers that step in the backward pass"),
    "a hook of the model": (DPO, dict(prepare=hooked), "hooks of the model, as hooked"),
    "backward": of_object("backward", "backward of the accelerator"),
    "compute_loss": of_object("compute_loss", "compute_loss of the trainer"),
    "_compute_loss": of_object("_compute_loss", "_compute_loss of the trainer"),
    "a substep": (DPO, dict(callbacks=[Clips()]), r"callbacks that act within a step, as Clips\.on_substep_end may do"),
    "read in every batch": (DPO, dict(trainer_class=Reading), "Reading, which overrides training_step"),
}
"""Code of users that sees each batch of a step: the trainer, options of `trained`, and how it is named."""

FALL_BACK = "models that fall back, since rows may depend on their batch: "
MODELS = {
    "neftune": (DPO, dict(neftune_noise_alpha=5.0), rf"{FALL_BACK}.*\[neftune\]"),
    "attention dropout": (DPO, dict(tiny=dict(attention_dropout=0.1)), rf"{FALL_BACK}.*\[attention-dropout\]"),
    "batch norm": (DPO, dict(prepare=with_batch_norm), FALL_BACK),
    "experts with a capacity": (DPO, dict(prepare=with_capacity), FALL_BACK),
}

WEIGHTED = collating(DPOTrainer, lambda batch: {**batch, "weight": torch.ones(1)})
BATCHES = {"another entry": (DPO, dict(trainer_class=WEIGHTED), "batches with weight")}

LOSSES = "which overrides the loss of"
STEPS = "which overrides training_step of"
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
    **CODE,
    **MODELS,
    **BATCHES,
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


def test_hooks_that_are_added_after_a_step_are_refused(tmp_path):
    """Before the weights change again."""
    model, weights = tiny_model(), []

    class Adds(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            weights[:] = [x.clone() for x in model.parameters()]
            stepping(model)

    fastdpo.patch(DPO, max_tokens=MAX_TOKENS[DPO])
    with pytest.raises(NotImplementedError, match=r"optimizers that step in the backward pass, as .*step may do"):
        train(tmp_path, model, tiny_model(seed=1), callbacks=[Adds()])
    assert all(map(torch.equal, [x.float() for x in weights], [x.float() for x in model.parameters()]))


def test_steps_of_the_object_that_do_not_call_those_of_its_class_are_refused(tmp_path):
    class Own(DPOTrainer):
        def train(self):
            self.training_step = lambda *args, **kwargs: torch.zeros(())
            return super().train()

    fastdpo.patch(DPO, max_tokens=MAX_TOKENS[DPO])
    with pytest.raises(NotImplementedError, match="Own, whose training_step does not call that of DPOTrainer"):
        trained(tmp_path, DPO, trainer_class=Own)
