"""A trainer whose class bypasses the patched functions, as LLaMA-Factory's does, says so."""

from collections import defaultdict

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer
from trl import DPOTrainer

from tests.support.comparison import assert_trained_alike
from tests.support.trl.dpo import assert_same_bits, train_both


class LikeLlamaFactory(DPOTrainer):
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


def test_its_models_stay_untouched(tmp_path, caplog):
    options, models = dict(trainer_class=LikeLlamaFactory, remove_unused_columns=False), []
    runs = train_both(tmp_path, prepare=lambda model: models.append(model) or model, **options)
    assert_trained_alike(runs, {}, same=assert_same_bits)
    for model in models:
        assert model.config._attn_implementation == "sdpa"
        assert not any("fastdpo" in name for module in model.modules() for name in vars(module))
    reason = "LikeLlamaFactory does not call DPOTrainer.__init__"
    assert caplog.text.count(f"trl.DPOTrainer (LikeLlamaFactory): not fused, {reason}") == 1
    assert caplog.text.count("not fused") == 1
