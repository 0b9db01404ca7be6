"""DPOTrainer of TRL < 0.29: every option that changes its computations, stock against patched.

Its logs round losses to four digits; gradients are compared to seven digits.
"""

from contextlib import nullcontext

import pytest
import torch
import transformers
from trl import DPOTrainer

import fastdpo
from tests.support.comparison import approximately, assert_far_from_same, assert_same_in_low_precision
from tests.support.models.altered_heads import ALTERED
from tests.support.models.families import HYBRID
from tests.support.trl.dpo import (
    adapter,
    assert_fused,
    assert_same,
    build,
    long_pairs,
    pairs,
    run_two_ranks,
    tiny_model,
    train,
)
from tests.support.trl.grouping import assert_steps_are_those_of_stock
from tests.support.trl.verified import assert_verified

LOSSES = (
    *("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_pair", "apo_zero", "apo_down"),
    *("discopop", "sft"),
)
FULL = dict(policy=3, reference=3)
LONG = long_pairs(((1, 9, 8), (11, 1, 3), (5, 3, 2), (14, 7, 6), (30, 4, 9), (2, 7, 1), (10, 8, 9), (8, 4, 3)))
CHECKPOINTED = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


# option: (changed arguments, number of calls of each kind)
OPTIONS = {
    "two_losses": (dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]), FULL),
    "exo_pair": (dict(loss_type="exo_pair", label_smoothing=1e-3), FULL),
    "robust": (dict(loss_type="robust", label_smoothing=0.1), FULL),
    "label_smoothing": (dict(label_smoothing=0.2), FULL),
    "rpo": (dict(rpo_alpha=0.7), FULL),
    "rpo_ipo": (dict(rpo_alpha=0.7, loss_type="ipo"), FULL),
    "ld": (dict(ld_alpha=0.5), FULL),
    "wpo": (dict(use_weighting=True), FULL),
    "wpo_ld_rpo": (dict(use_weighting=True, ld_alpha=0.5, rpo_alpha=0.3), FULL),
    "js_divergence": (dict(f_divergence_type="js_divergence"), FULL),
    "alpha_divergence": (dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.7), FULL),
    "reference_free": (dict(reference_free=True), FULL),
    "logits_to_keep": (dict(use_logits_to_keep=True), FULL),
    "logits_to_keep_ld": (dict(use_logits_to_keep=True, ld_alpha=0.5, use_weighting=True), FULL),
    "keep_start": (dict(max_length=12, truncation_mode="keep_start", data=LONG), FULL),
    "keep_end": (dict(max_length=12, truncation_mode="keep_end", data=LONG), FULL),
    "max_prompt_length": (dict(max_prompt_length=6, max_completion_length=4, data=LONG), FULL),
    "precompute": (dict(precompute_ref_log_probs=True, evaluate=4), dict(policy=3, eval=1, reference=4 + 1)),
    "precompute_batch": (
        dict(precompute_ref_log_probs=True, precompute_ref_batch_size=6, evaluate=4),
        dict(policy=3, eval=1, reference=3 + 1),
    ),
    "precompute_adapter": (dict(precompute_ref_log_probs=True, **adapter()), dict(policy=3, reference=4)),
    "evaluation": (dict(evaluate=6), dict(policy=3, reference=3 + 2, eval=2)),
    "evaluation_alone": (dict(evaluate=6, only_evaluate=True), dict(reference=2, eval=2)),
    "evaluation_with_metrics": (
        dict(evaluate=6, compute_metrics=lambda prediction: {"mean": float(prediction.predictions.mean())}),
        dict(policy=3, reference=3 + 2, eval=2),
    ),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4, reference=4)),
    "last_batch_is_partial": (dict(per_device_train_batch_size=6), FULL),
    "adapter": (dict(evaluate=4, **adapter()), dict(policy=3, reference=3 + 1, eval=1)),
    "adapter_everywhere": (adapter(target_modules="all-linear"), FULL),
    "checkpointing": (CHECKPOINTED, FULL),
    "checkpointing_reentrant": (
        dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
        FULL,
    ),
    "checkpointed_adapter": (dict(**CHECKPOINTED, **adapter()), FULL),
    "sync_ref_model": (dict(sync_ref_model=True, ref_model_sync_steps=1), FULL),
    "tied": (dict(tiny=dict(tie_word_embeddings=True)), FULL),
    "eager": (dict(tiny=dict(attn_implementation="eager")), FULL),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_loss(both, loss):
    stock, patched = both(loss_type=loss, max_steps=2)
    assert_same(stock, patched)
    assert_fused(patched, policy=2, reference=2)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_the_comparison_detects_a_missing_token(both, tmp_path, loss):
    """A missing token makes the comparison of trainings fail."""
    options = dict(loss_type=loss, max_steps=-1, num_train_epochs=1)
    stock, _ = both(**options)
    data = pairs(16)
    data[7]["chosen"] = data[7]["chosen"].rsplit(" ", 1)[0]
    with fastdpo.patched("trl.DPOTrainer"):
        sabotaged = train(tmp_path / "sabotaged", tiny_model(), tiny_model(seed=1), data=data, **options)
    assert_far_from_same(stock, sabotaged, stock.in_float64)


@pytest.mark.parametrize("option", OPTIONS)
def test_option(both, option):
    changes, calls = OPTIONS[option]
    stock, patched = both(**changes)
    assert_same(stock, patched)
    assert_fused(patched, **calls)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "gemma", "phi3", "cohere", "olmo2"])
def test_family(both, kind):
    stock, patched = both(kind, max_steps=2, tiny=dict(without=("head_dim",) if kind in ("qwen2", "phi3") else ()))
    assert_same(stock, patched)
    assert_fused(patched, policy=2, reference=2)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "bamba", "mamba2", "lfm2"])
def test_hybrid_family(both, name):
    """The mixers of transformers 4 choose their functions when they are created, and run on whole rows."""
    stock, patched = both(name, max_steps=2, tiny=HYBRID[name][1])
    assert_same(stock, patched)
    assert_fused(patched, policy=2, reference=2)


def test_verifying(tmp_path, caplog):
    assert_verified(
        lambda directory: train(directory, tiny_model(), tiny_model(seed=1)), tmp_path, "trl.DPOTrainer", caplog=caplog
    )


def test_router_loss(both):
    sizes = dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1)
    stock, patched = both("mixtral", tiny=sizes)
    assert "aux_loss" in stock.logs[0]
    assert_same(stock, patched)
    assert_fused(patched, policy=3, reference=3)


def test_bf16(both, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # transformers 4 sets it and does not reset it
    stock, patched = both(bf16=True)
    assert_fused(patched, policy=3, reference=3)
    assert_same_in_low_precision(stock, patched, torch.bfloat16, stock.in_float64)


def test_padding_free_equals_padded(both, tmp_path, caplog):
    """Compares with padded stock: its padding_free needs FlashAttention and is wrong for ipo."""
    padded, _ = both(loss_type="ipo", rpo_alpha=0.5, use_weighting=True)
    with fastdpo.patched("trl.DPOTrainer"):
        options = dict(padding_free=True, loss_type="ipo", rpo_alpha=0.5, use_weighting=True)
        free = train(tmp_path / "free", tiny_model(seed=0), tiny_model(seed=1), **options)
    assert_same(padded, free)
    assert_fused(free, policy=3, reference=3)
    assert "Padding-free training is enabled" not in caplog.text


def test_a_prompt_that_is_truncated_entirely_falls_back_to_stock(both, caplog):
    data = [dict(prompt="w1 w2 ", chosen="w3 " * 20, rejected="w4 " * n) for n in (3, 25, 7, 9)]
    stock, patched = both(max_length=12, truncation_mode="keep_end", data=data, max_steps=1)
    assert_same(stock, patched)
    assert patched.calls == {("policy", "stock"): 1, ("reference", "stock"): 1}
    assert "truncation has left nothing of a prompt" in caplog.text


def test_unsupported_models_fall_back_to_stock(both, caplog):
    sizes = dict(without=("head_dim", "num_key_value_heads", "intermediate_size", "max_position_embeddings"), n_layer=2)
    stock, patched = both("bloom", tiny=sizes, evaluate=4)
    assert_same(stock, patched)
    assert patched.calls == {("policy", "stock"): 3, ("reference", "stock"): 4, ("eval", "stock"): 1}
    assert "not fused" in caplog.text


def test_an_encoder_decoder_falls_back_to_stock(tmp_path, caplog):
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0
    )
    runs = []
    for name in ("stock", "patched"):
        torch.manual_seed(0)
        models = [transformers.T5ForConditionalGeneration(config) for _ in range(2)]
        if name == "stock":
            runs.append(train(tmp_path / name, *models))
        else:
            with fastdpo.patched("trl.DPOTrainer"):
                runs.append(train(tmp_path / name, *models))
    assert_same(*runs)
    assert runs[1].calls == {("policy", "stock"): 3, ("reference", "stock"): 3}
    assert "is an encoder-decoder" in caplog.text


@pytest.mark.parametrize("name", ["pixel_values", "image_sizes", "token_type_ids"])
def test_additional_inputs_fall_back_to_stock(tmp_path, caplog, monkeypatch, name):
    batches = []
    stock = DPOTrainer.concatenated_forward

    def watched(self, model, batch, is_ref_model=False):
        batches.append(batch)
        return stock(self, model, batch, is_ref_model)

    monkeypatch.setattr(DPOTrainer, "concatenated_forward", watched)
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1))
        batch = trainer.data_collator(list(trainer.train_dataset))
        batch[name] = torch.zeros_like(batch["prompt_input_ids"])
        trainer.concatenated_forward(trainer.model, batch)  # a Llama model does not need it
    assert batches == [batch]
    assert f"batches also hold {name}" in caplog.text


@pytest.mark.parametrize("flag", ["use_liger_loss", "use_liger_kernel"])
def test_liger_options_fall_back_to_stock(tmp_path, caplog, flag):
    class WithLiger(DPOTrainer):
        def create_accelerator_and_postprocess(self):
            setattr(self.args, flag, True)  # only here: TRL rejects the flag elsewhere if Liger is not installed
            super().create_accelerator_and_postprocess()
            setattr(self.args, flag, False)

    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=WithLiger)
    assert caplog.text.count(f"not fused, {flag} is set") == 1
    assert "forward" not in vars(trainer.model)


class OwnLoss(DPOTrainer):
    """Computes another loss from the log-probs of the trainer's forward, like LLaMA-Factory."""

    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        policy = self.concatenated_forward(model, batch)
        with torch.no_grad():
            reference = self.concatenated_forward(self.ref_model, batch, is_ref_model=True)
        margin = sum(
            sign * (policy[name] - reference[name]) for sign, name in ((1, "chosen_logps"), (-1, "rejected_logps"))
        )
        return torch.nn.functional.softplus(-margin).mean(), {"margin": 0.1 * margin.mean().item()}


class OwnForward(DPOTrainer):
    """Adds values from logits in an overridden forward, like ms-swift."""

    def concatenated_forward(self, model, batch, is_ref_model=False):
        outputs = super().concatenated_forward(model, batch, is_ref_model)
        ids = batch["chosen_input_ids"]
        logits = model(ids, attention_mask=batch["chosen_attention_mask"]).logits
        logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        sums = (logps * batch["chosen_attention_mask"][:, 1:]).sum(1)
        return outputs | {"chosen_logps": outputs["chosen_logps"] + sums}


@pytest.mark.parametrize("trainer_class", [OwnLoss, OwnForward])
def test_subclass(both, trainer_class):
    stock, patched = both(trainer_class=trainer_class)
    assert_same(stock, patched)
    assert_fused(patched, policy=3, reference=3)


REMEMBERED = {
    "full": dict(),
    "adapter": adapter(),
    "ipo": dict(loss_type="ipo"),
    "truncated": dict(max_length=12, truncation_mode="keep_start", data=LONG),
    "other batches in evaluation": dict(per_device_eval_batch_size=3),
}


@pytest.mark.parametrize("option", REMEMBERED)
def test_training_with_a_remembered_reference(both, option):
    epochs = dict(data=pairs(8), max_steps=-1, num_train_epochs=3, evaluate=8, eval_strategy="epoch")
    stock, patched = both(reference_memory=True, **{**epochs, **REMEMBERED[option]})
    assert_same(stock, patched)
    batches = 2 + (3 if "evaluation" in option else 2)  # of an epoch and of an evaluation
    calls = patched.calls
    assert calls["reference", "fused"] == batches
    assert calls["reference", "remembered"] == calls["policy", "fused"] + calls["eval", "fused"] - batches


class Rewritten(DPOTrainer):
    """Moves its reference towards the policy with writes that do not change tensor versions."""

    def training_step(self, *args, **kwargs):
        if self.state.global_step == 4:  # two epochs are over
            for reference, policy in zip(self.ref_model.parameters(), self.model.parameters(), strict=True):
                reference.data.lerp_(policy.data, 0.5)
        return super().training_step(*args, **kwargs)


def test_a_reference_that_changes_is_not_remembered(tmp_path, caplog):
    options = dict(data=pairs(8), max_steps=-1, num_train_epochs=4, trainer_class=Rewritten)
    runs = []
    for name in ("stock", "patched"):
        with fastdpo.patched("trl.DPOTrainer", reference_memory=True) if name == "patched" else nullcontext():
            runs.append(train(tmp_path / name, tiny_model(), tiny_model(seed=1), **options))
    assert_same(*runs)
    assert "the reference has changed; reference_memory is cleared" in caplog.text
    calls = runs[1].calls
    assert (calls["reference", "fused"], calls["reference", "remembered"]) == (4, 4)


class DecidesByMetrics(DPOTrainer):
    """Makes decisions from the latest metrics."""

    def get_batch_loss_metrics(self, *args, **kwargs):
        loss, metrics = super().get_batch_loss_metrics(*args, **kwargs)
        vars(self).setdefault("decisions", []).append(
            {name: (round(value, 3), value > 0.5, type(value)) for name, value in metrics.items()}
        )
        return loss, metrics


def test_a_subclass_that_reads_metrics_decides_like_stock(tmp_path):
    decisions = []
    for name in ("stock", "patched"):
        with fastdpo.patched("trl.DPOTrainer") if name == "patched" else nullcontext():
            options = dict(trainer_class=DecidesByMetrics, max_steps=3)
            trainer = build(tmp_path / name, tiny_model(), tiny_model(seed=1), 16, **options)
            trainer.train()
            stored = trainer.get_batch_loss_metrics(trainer.model, next(iter(trainer.get_train_dataloader())))[1]
            assert {type(value) for value in stored.values()} == {float}
        decisions.append(trainer.decisions)
    assert decisions[0] == decisions[1]
    assert {decision["rewards/accuracies"][1] for decision in decisions[0]} == {True, False}


def test_two_ranks(tmp_path):
    """The logs equal stock's of all ranks, and each step has the collectives of stock."""
    stock, uncut, patched = (run_two_ranks(kind, tmp_path) for kind in ("stock", "uncut", "patched"))
    assert patched[0]["logs"] == patched[1]["logs"]
    for a, b in zip(uncut[0]["logs"], patched[0]["logs"], strict=True):
        assert {k: x for k, x in b.items() if k != "eval_loss"} == approximately(
            {k: x for k, x in a.items() if k != "eval_loss"}
        )
    assert patched[0]["counts"] == stock[0]["counts"]


def test_unpatching_restores_the_model_and_the_trainer(tmp_path):
    model = tiny_model()
    with fastdpo.patched("trl.DPOTrainer"):
        train(tmp_path / "first", model, tiny_model(seed=1), data=pairs(4), max_steps=1)
        assert model.config._attn_implementation == "fastdpo_sdpa"
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model)
    run = train(tmp_path / "second", model, tiny_model(seed=1), data=pairs(4), max_steps=1)
    assert not run.calls
    assert "fastdpo" not in DPOTrainer.concatenated_forward.__module__


def test_a_model_can_serve_a_second_trainer(tmp_path):
    runs = []
    for name in ("stock", "patched"):
        model, reference = tiny_model(), tiny_model(seed=1)
        with fastdpo.patched("trl.DPOTrainer") if name == "patched" else nullcontext():
            build(tmp_path / f"{name} first", reference, model)  # with swapped roles
            runs.append(train(tmp_path / name, model, reference, use_weighting=True))  # needs other statistics
    assert_same(*runs)
    assert_fused(runs[1], policy=3, reference=3)


def test_strict_raises_instead_of_falling_back(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    data = [dict(prompt="w1 w2 ", chosen="w3 " * 20, rejected="w4 " * 9)] * 4
    with (
        fastdpo.patched("trl.DPOTrainer"),
        pytest.raises(fastdpo.NotFused, match="truncation has left nothing of a prompt"),
    ):
        train(tmp_path, tiny_model(), tiny_model(seed=1), max_length=12, truncation_mode="keep_end", data=data)


@pytest.mark.parametrize("alter", ALTERED)
def test_a_custom_head_or_forward_falls_back_to_stock(both, caplog, alter):
    stock, patched = both(prepare=alter)
    assert_same(stock, patched)
    assert patched.calls == {("policy", "stock"): 3, ("reference", "stock"): 3}
    assert ALTERED[alter] in caplog.text


def test_pairs_that_begin_alike_come_together(tmp_path, monkeypatch):
    assert_steps_are_those_of_stock(tmp_path, monkeypatch)
