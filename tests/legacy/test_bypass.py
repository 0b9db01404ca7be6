"""A trainer whose class bypasses the patched functions, as LLaMA-Factory's does, says so."""

from collections import defaultdict

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer
from trl import DPOTrainer

import fastdpo
from tests.support.trl.dpo import assert_fused, assert_same_bits, build, tiny_model, train, train_both


class OwnInit(DPOTrainer):
    """Calls `Trainer.__init__` directly, and sets what it uses of DPOTrainer's attributes."""

    def __init__(self, model, ref_model, args, train_dataset, processing_class, callbacks=None, **ignored):
        self.beta, self.ref_model = args.beta, ref_model
        self.precompute_ref_log_probs = self._peft_has_been_casted_to_bf16 = False
        self._stored_metrics = defaultdict(lambda: defaultdict(list))

        def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
            texts = [row["prompt"] + row[name] for name in ("chosen", "rejected") for row in rows]
            ids = [torch.tensor(processing_class(text)["input_ids"]) for text in texts]
            return {
                "input_ids": pad_sequence(ids, batch_first=True),
                "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
            }

        Trainer.__init__(self, model, args, data_collator=collate, train_dataset=train_dataset, callbacks=callbacks)
        self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)


class LikeLlamaFactory(OwnInit):
    def concatenated_forward(self, model, batch, is_ref_model=False):
        targets, scored = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
        logps = model(**batch).logits[:, :-1].log_softmax(-1).gather(2, targets[..., None])[..., 0]
        return (logps * scored).sum(1).chunk(2)

    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        chosen, rejected = self.concatenated_forward(model, batch)
        with torch.no_grad():
            ref_chosen, ref_rejected = self.concatenated_forward(self.ref_model, batch, is_ref_model=True)
        margins = chosen - rejected - (ref_chosen - ref_rejected)
        return -torch.nn.functional.logsigmoid(self.beta * margins).mean(), {"margins": margins.mean().item()}


class OwnForward(DPOTrainer):
    def concatenated_forward(self, model, batch, is_ref_model=False):
        logps = model(batch["chosen_input_ids"]).logits.log_softmax(-1).mean((1, 2))
        logits = torch.zeros(())
        return dict(chosen_logps=logps, rejected_logps=-logps, mean_chosen_logits=logits, mean_rejected_logits=logits)


def test_llama_factory(tmp_path, caplog):
    options = dict(trainer_class=LikeLlamaFactory, remove_unused_columns=False)
    stock, patched = train_both(tmp_path, **options)
    assert_same_bits(stock, patched)
    assert not patched.calls
    reason = "LikeLlamaFactory does not call DPOTrainer.__init__"
    assert caplog.text.count(f"trl.DPOTrainer (LikeLlamaFactory): not fused, {reason}") == 1
    assert caplog.text.count("not fused") == 1


@pytest.mark.parametrize("trainer_class", [OwnInit, LikeLlamaFactory])
def test_its_models_stay_untouched(tmp_path, caplog, trainer_class):
    models = [tiny_model(seed=seed) for seed in range(2)]
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, *models, trainer_class=trainer_class)
    for model in models:
        assert model.config._attn_implementation == "sdpa"
        assert not any("fastdpo" in name for module in model.modules() for name in vars(module))
    assert not any("fastdpo" in name for name in vars(trainer))
    assert caplog.text.count("not fused") == 1
    assert f"{trainer_class.__name__} does not call DPOTrainer.__init__" in caplog.text


def test_a_trainer_without_a_fused_call_says_so_in_its_first_step(tmp_path, caplog):
    with fastdpo.patched("trl.DPOTrainer"):
        assert_fused(train(tmp_path / "fused", tiny_model(), tiny_model(seed=1)), policy=3, reference=3)
        assert "not fused" not in caplog.text
        models = tiny_model(), tiny_model(seed=1)
        assert not train(tmp_path / "own", *models, trainer_class=OwnForward).calls
    reason = "not fused, no call of the policy has reached fastdpo in the first step; OwnForward overrides"
    assert caplog.text.count(f"(OwnForward): {reason} concatenated_forward") == caplog.text.count("not fused") == 1
