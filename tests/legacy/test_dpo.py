"""DPOTrainer of TRL < 0.29: its inputs, subclasses, metrics and ranks."""

import pytest
import torch
import transformers
from trl import DPOTrainer

import fastdpo
from tests.support.comparison import approximately, assert_trained_alike
from tests.support.recorded_calls import recorded_calls
from tests.support.trl.dpo import build, run_two_ranks, tiny_model, train


def test_padding_free_equals_padded(both, tmp_path, caplog):
    """Compares with padded stock: its padding_free needs FlashAttention and is wrong for ipo."""
    padded, _ = both(loss_type="ipo", rpo_alpha=0.5, use_weighting=True)
    with fastdpo.patched("trl.DPOTrainer"):
        options = dict(padding_free=True, loss_type="ipo", rpo_alpha=0.5, use_weighting=True)
        free = train(tmp_path / "free", tiny_model(seed=0), tiny_model(seed=1), **options)
    assert_trained_alike((padded, free), policy=3, reference=3)
    assert "Padding-free training is enabled" not in caplog.text


def test_an_encoder_decoder_falls_back_to_stock(both, caplog):
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0
    )

    def build(kind, seed):
        torch.manual_seed(seed)
        return transformers.T5ForConditionalGeneration(config)

    assert_trained_alike(both(build=build), {("policy", "stock"): 3, ("reference", "stock"): 3})
    assert "is an encoder-decoder" in caplog.text


@pytest.mark.parametrize("name", ["pixel_values", "image_sizes", "token_type_ids"])
def test_additional_inputs_fall_back_to_stock(tmp_path, caplog, monkeypatch, name):
    given = lambda result, trainer, model, batch, *rest: batch  # noqa: E731
    batches = recorded_calls(monkeypatch, DPOTrainer, "concatenated_forward", given)
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


def test_subclass(both):
    assert_trained_alike(both(trainer_class=OwnLoss), policy=3, reference=3)


def test_options_of_later_versions_are_named(caplog):
    with fastdpo.patched("trl.DPOTrainer", max_tokens=500):
        pass
    assert "fastdpo: trl.DPOTrainer: max_tokens requires TRL 1.8 or later" in caplog.messages


def test_two_ranks(tmp_path):
    """The logs equal stock's of all ranks, and each step has the collectives of stock."""
    stock, uncut, patched = (run_two_ranks(kind, tmp_path) for kind in ("stock", "uncut", "patched"))
    assert patched[0]["logs"] == patched[1]["logs"]
    for a, b in zip(uncut[0]["logs"], patched[0]["logs"], strict=True):
        assert {k: x for k, x in b.items() if k != "eval_loss"} == approximately(
            {k: x for k, x in a.items() if k != "eval_loss"}
        )
    assert patched[0]["counts"] == stock[0]["counts"]
