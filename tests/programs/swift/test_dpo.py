"""ms-swift's DPOTrainer in this process: what is not fused, its versions, and its sampler."""

import importlib.metadata

import pytest
import torch
from swift.rlhf_trainers.dpo_trainer import DPOTrainer

import fastdpo
from tests.support.programs.swift_runs import train, train_both, use_trainer
from tests.support.trl.dpo import assert_same_bits

NAME = "swift.DPOTrainer"


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
