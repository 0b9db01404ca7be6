"""ms-swift's DPOTrainer in this process: every option that changes its computations, stock against
patched.
"""

import importlib.metadata

import pytest
import torch
from swift.rlhf_trainers.dpo_trainer import DPOTrainer

import fastdpo
from fastdpo.integrations.patching import examine
from tests.support.comparison import assert_far_from_same
from tests.support.programs.swift_runs import (
    LORA,
    PACKING,
    VARIED,
    forget_a_token,
    join_rows,
    join_rows_and_scale_logits,
    scale_logits,
    train,
    train_both,
    use_trainer,
)
from tests.support.trl.dpo import assert_fused, assert_same, assert_same_bits
from tests.support.trl.verified import assert_verified

NAME = "swift.DPOTrainer"
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
OPTIONS = {
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss(tmp_path, loss, layout):
    stock, patched = train_both(tmp_path, loss_type=loss, max_steps=2, **LAYOUTS[layout])
    assert_same(stock, patched)
    assert_fused(patched, policy=2, reference=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_option(tmp_path, name, layout):
    options, calls = OPTIONS[name]
    stock, patched = train_both(tmp_path, **options, **LAYOUTS[layout])
    assert_same(stock, patched)
    assert_fused(patched, **calls)


@pytest.mark.parametrize("steps", [dict(max_steps=3), dict(max_steps=1, gradient_accumulation_steps=3)])
def test_packing(tmp_path, steps):
    stock, patched = train_both(tmp_path, **PACKING, **steps, per_device_train_batch_size=1)
    assert_same(stock, patched)
    assert_fused(patched, **FULL)


@pytest.mark.parametrize(
    ("kind", "layout", "calls"),
    [*(("dpo", x, 2) for x in LAYOUTS), *(("kto", x, 3) for x in LAYOUTS), ("cpo", "padded", 1), ("orpo", "padded", 1)],
)
def test_verifying(tmp_path, caplog, kind, layout, calls):
    def run(directory):
        return train(directory, kind, max_steps=2, **LAYOUTS[layout])

    assert_verified(run, tmp_path, "swift", caplog=caplog, calls=calls)


def test_rows_that_are_padded_on_the_left(tmp_path):
    stock, patched = train_both(tmp_path, prepare=pad_left)
    assert_same(stock, patched)
    assert_fused(patched, **FULL)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_comparison_detects_a_missing_token(tmp_path, monkeypatch, layout):
    forget_a_token(monkeypatch)
    stock, patched = train_both(tmp_path, **LAYOUTS[layout])
    assert_far_from_same(stock, patched, stock.in_float64)


@pytest.mark.parametrize("prepare", [scale_logits, join_rows_and_scale_logits])
def test_a_model_that_is_not_fused_trains_as_in_stock(tmp_path, caplog, prepare):
    """Its first call is the one that finds this out: the batch has been given to the model then."""
    stock, patched = train_both(tmp_path, prepare=prepare)
    assert_same(stock, patched)
    assert patched.calls == {("policy", "stock"): 3, ("reference", "stock"): 3}
    assert caplog.text.count(f"{NAME} (policy): not fused, the head has hooks") == 1


def test_a_batch_that_is_not_supported_falls_back(tmp_path, caplog):
    def add_weights(trainer) -> None:
        forward = trainer.concatenated_forward
        trainer.concatenated_forward = lambda model, batch, **options: forward(
            model, {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}, **options
        )

    def ignore_weights(pipeline) -> None:
        for model in (pipeline.model, pipeline.ref_model):
            model.register_forward_pre_hook(
                lambda module, args, options: (args, {k: x for k, x in options.items() if k != "token_type_ids"}),
                with_kwargs=True,
            )

    stock, patched = train_both(tmp_path, prepare=ignore_weights, before_training=add_weights)
    assert_same_bits(stock, patched)
    assert patched.calls == {("policy", "stock"): 3, ("reference", "stock"): 3}
    assert caplog.text.count(f"{NAME} (policy): not fused, batches also hold token_type_ids") == 1


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        ("args", "use_liger_kernel", True, "use_liger_kernel is set"),
        ("template", "sequence_parallel_size", 2, "sequences are split across ranks"),
        ("args", "tuner_backend", "unsloth", "Unsloth replaces the model's functions"),
        ("model_meta", "is_multimodal", True, "the template of a multimodal model"),
    ],
)
def test_what_is_not_supported_leaves_the_models_alone(tmp_path, caplog, monkeypatch, owner, name, value, reason):

    class WithOption(DPOTrainer):
        def create_accelerator_and_postprocess(self):
            before = getattr(getattr(self, owner), name, None)
            setattr(getattr(self, owner), name, value)  # only here: ms-swift needs other packages for it elsewhere
            super().create_accelerator_and_postprocess()
            setattr(getattr(self, owner), name, before)

    models = []
    use_trainer(monkeypatch, WithOption)
    with fastdpo.patched("swift"):
        run = train(tmp_path, before_training=lambda trainer: models.extend((trainer.model, trainer.ref_model)))
    assert not run.calls
    assert not any("fastdpo" in name for model in models for m in model.modules() for name in vars(m))
    assert caplog.text.count("not fused") == 1
    assert f"{NAME} (WithOption): not fused, {reason}" in caplog.text


def test_a_subclass_that_scores_its_batches_itself_is_left_alone(tmp_path, caplog, monkeypatch):
    class OwnForward(DPOTrainer):
        def concatenated_forward(self, model, batch, is_ref_model=False):
            targets = batch["labels"][:, 1:]
            logps = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1].log_softmax(-1)
            logps = logps.gather(2, targets.clamp(min=0)[..., None])[..., 0].where(targets != -100, 0).sum(1)
            chosen, rejected = logps.chunk(2)
            means = {f"mean_{name}_logits": logps.mean() for name in ("chosen", "rejected")}
            return dict(chosen_logps=chosen, rejected_logps=rejected, **means)

    use_trainer(monkeypatch, OwnForward)
    stock, patched = train_both(tmp_path)
    assert_same_bits(stock, patched)
    assert not patched.calls
    reason = "OwnForward.concatenated_forward does not call DPOTrainer.concatenated_forward"
    assert caplog.text.count(f"{NAME} (OwnForward): not fused, {reason}") == caplog.text.count("not fused") == 1


def test_unpatching_during_a_training(tmp_path):
    stock = train(tmp_path / "stock")
    fastdpo.patch("swift")
    try:
        unpatched = train(tmp_path / "unpatched", before_training=lambda trainer: fastdpo.unpatch())
    finally:
        fastdpo.unpatch()
    assert_same_bits(stock, unpatched)
    assert not unpatched.calls


def test_unpatching_restores_the_class():
    before = dict(vars(DPOTrainer))
    with fastdpo.patched("swift"):
        assert vars(DPOTrainer)["concatenated_forward"] is not before["concatenated_forward"]
    assert dict(vars(DPOTrainer)) == before
    assert examine(NAME).seams[0].on


def test_another_signature_is_off(monkeypatch):
    monkeypatch.setattr(DPOTrainer, "concatenated_forward", lambda self, model, batch: None)
    (seam,) = (seam for seam in fastdpo.patch().seams if seam.name == NAME)
    fastdpo.unpatch()
    assert not seam.on
    assert "concatenated_forward must have the parameters" in seam.reason


def test_an_older_version_is_off_with_one_reason(tmp_path, monkeypatch, caplog):
    """In the report, and when a trainer is built if the line of TRL's trainer is on."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.5" if name == "ms-swift" else version(name))
    with fastdpo.patched() as report:
        run = train(tmp_path)
    assert not run.calls
    seams = {seam.name: seam for seam in report.seams}
    assert "this version is not supported" in seams[NAME].reason
    assert caplog.text.count("not fused") == seams["trl.DPOTrainer"].on


def test_patched_trainers_are_reported_on_without_a_warning(tmp_path, caplog):
    """Also by the line of TRL's own DPOTrainer, whose subclass ms-swift's is."""
    with fastdpo.patched():
        run = train(tmp_path, workload=VARIED)
    assert_fused(run, **FULL)
    assert "not fused" not in caplog.text


def test_a_sampler_of_its_own_is_not_reordered(tmp_path):
    reason = r"the data loader of DPOTrainer\.get_train_dataloader, which accelerate has not prepared"
    with (
        fastdpo.patched("swift.DPOTrainer", group_prompts=True),
        pytest.raises(NotImplementedError, match=f"^patch: group_prompts does not support {reason}"),
    ):
        train(tmp_path)
