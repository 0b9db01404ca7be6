"""Unusual batches, collators and subclasses give the same results as TRL, or an error."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

import fastdpo
from tests.support.comparison import assert_trained_alike
from tests.support.trl.collators import Editing
from tests.support.trl.dpo import WORDS, assert_fused, pairs, tiny_model, train

FILL = {"input_ids": 0, "attention_mask": 0, "completion_mask": 0}
POLICY_STOCK = {("policy", "stock"): 3, ("reference", "stock"): 3}


@dataclass
class Padded(DataCollatorForPreference):
    """TRL's collator with more padding. Real tokens keep their positions within the row."""

    left: int = 0
    right: int = 0
    each_row: bool = False  # all padding of a row on its left, as for generation

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        for name, fill in FILL.items():
            wider = pad(batch[name], (self.left, self.right), value=fill)
            if self.each_row:
                shifts = wider.shape[1] - self.left - batch["attention_mask"].sum(1)
                wider = torch.stack([row.roll(int(n)) for row, n in zip(wider, shifts, strict=True)])
            batch[name] = wider
        return batch


@dataclass
class Edited(Editing, DataCollatorForPreference):
    """TRL's collator, with `edit` applied to its batches."""


@pytest.mark.parametrize(
    "collator",
    [
        Padded(pad_token_id=0, left=5),  # even the longest row
        Padded(pad_token_id=0, each_row=True),  # rows start at different columns and end at the same one
        Padded(pad_token_id=0, right=7),  # wider than the longest row
        Padded(pad_token_id=0, left=2, right=3),
        Padded(pad_token_id=17, right=2),  # pads with an ordinary token: only the mask marks padding
    ],
    ids=["left", "flush_right", "right", "both_sides", "pads_with_a_word"],
)
def test_padding_of_a_custom_collator(tmp_path, collator):
    """Stock runs with its own collator here: it counts left padding in the position ids."""
    stock = train(tmp_path / "stock", tiny_model(seed=0), tiny_model(seed=1))
    with fastdpo.patched():
        run = train(tmp_path / "patched", tiny_model(seed=0), tiny_model(seed=1), data_collator=collator)
    assert_trained_alike((stock, run), policy=3, reference=3)


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return dict(prompt=prompt, chosen=chosen, rejected=rejected)


ROWS = {
    "empty_answer": pair("w1 w2 ", "", "w5 w6"),  # only the end token
    "empty_answers": pair("w1 w2 ", "", ""),
    "one_token": pair("w1 w2 ", "w5", "w6"),
    "equal_answers": pair("w1 w2 ", "w5 w6 w7", "w5 w6 w7"),  # a margin of 0; each row is contained in the other
    "prefix": pair("w1 w2 ", "w5 w6 w7", "w5 w6"),
    "end_token_inside": pair("w1 w2 ", "w5 <eos> w6", "w5 <eos> <eos>"),
    "pad_token_inside": pair("w1 <pad> w2 ", "w5 <pad> w6", "<pad> w6"),  # real tokens, not padding
    "prompt_of_one_token": pair("w1 ", "w5 w6", "w7"),
    "no_prompt": pair("", "w5 w6 w7", "w6 w7"),  # no position predicts the first token of an answer
    "no_prompt_and_empty_answer": pair("", "", "w6 w7"),  # no token of this row is scored
    "nothing": pair("", "", ""),
}


@pytest.mark.parametrize("name", ROWS)
def test_degenerate_pairs(both, name):
    """Trains on a batch of only this pair, then on one with ordinary pairs."""
    data = [*[ROWS[name]] * 5, *pairs(3)]
    assert_trained_alike(both(data=data, max_steps=2, train_sampling_strategy="sequential"), policy=2, reference=2)


def label_after_the_end(batch):
    """One label on a padding token, predicted by the last real position."""
    length = int(batch["attention_mask"][0].sum())
    if length < batch["input_ids"].shape[1]:
        batch["completion_mask"][0, length] = 1


FUSED = {
    "ignored row": lambda batch: batch["completion_mask"][1].zero_(),
    "ignored pair": lambda batch: batch["completion_mask"][::4].zero_(),
    "row of padding": lambda batch: [batch[name][2].fill_(fill) for name, fill in FILL.items()],
    "gaps in answers": lambda batch: batch["completion_mask"][:, ::3].zero_(),  # such as the output of a tool
    "scored prompt": lambda batch: batch.update(completion_mask=batch["attention_mask"].clone()),
    "label after the end": label_after_the_end,
    "mask as bool": lambda batch: batch.update(attention_mask=batch["attention_mask"].bool()),
    "mask as float": lambda batch: batch.update(attention_mask=batch["attention_mask"].float()),
    "int32 ids": lambda batch: batch.update({name: batch[name].int() for name in FILL}),
}


@pytest.mark.parametrize("edit", FUSED)
def test_unusual_batches_are_fused(both, edit):
    assert_trained_alike(both(data_collator=Edited(pad_token_id=0, edit=FUSED[edit])), policy=3, reference=3)


def causal_4d(batch):
    mask = batch["attention_mask"].bool()
    length = mask.shape[1]
    batch["attention_mask"] = (mask[:, None, None] & torch.ones(length, length).tril().bool()).expand(-1, 1, -1, -1)


CONTRADICTING = {
    "padding position": lambda batch: batch["completion_mask"].fill_(1),
    "has holes": lambda batch: batch["attention_mask"][1, 1].zero_(),
    "attention_mask must have the shape of input_ids [8, 23]; got [8, 1, 23, 23]": causal_4d,
}


@pytest.mark.parametrize("reason", CONTRADICTING)
def test_contradicting_masks_fall_back_to_stock(both, caplog, reason):
    collator = Edited(pad_token_id=0, edit=CONTRADICTING[reason])
    assert_trained_alike(both(data_collator=collator, pad_to_multiple_of=32), POLICY_STOCK)
    assert reason in caplog.text


def outside(column: int):
    def edit(batch):
        row = batch["input_ids"][0, : int(batch["attention_mask"][0].sum())]
        row[column] = len(WORDS)

    return Edited(pad_token_id=0, edit=edit)


OUTSIDE = {
    "prompt": outside(0),
    "end": outside(-1),  # which no position depends on
    "padding": DataCollatorForPreference(pad_token_id=len(WORDS)),
    "negative padding": DataCollatorForPreference(pad_token_id=-1),
}


@pytest.mark.parametrize("where", OUTSIDE)
def test_ids_outside_the_embeddings_raise(tmp_path, caplog, where):
    options = dict(data_collator=OUTSIDE[where])
    for patch in (contextlib.nullcontext, fastdpo.patched):
        with patch(), pytest.raises(IndexError, match="out of range"):
            train(tmp_path, tiny_model(), tiny_model(seed=1), **options)
    assert "trl.DPOTrainer (policy): not fused, the batch has ids from " in caplog.text


def head_with_nan(model):
    model.lm_head.weight.data[-1] = float("nan")
    return model


@pytest.mark.parametrize(
    "broken",
    [
        dict(prepare=head_with_nan),  # every log-probability is NaN
        dict(learning_rate=1e30),  # only the first step is finite
    ],
    ids=["head", "diverged"],
)
def test_a_non_finite_loss_is_not_hidden(both, broken):
    stock, patched = both(**broken, max_steps=2, logging_nan_inf_filter=False)
    assert_fused(patched, policy=2, reference=2)
    a, b = stock.logs[1], patched.logs[1]
    assert math.isnan(a["loss"])
    assert {name for name in a if math.isnan(a[name])} == {name for name in b if math.isnan(b[name])}
    for name, gradient in stock.gradients[1].items():
        assert torch.equal(gradient.isnan(), patched.gradients[1][name].isnan()), name


class WithLogits(DPOTrainer):
    """Calls the model a second time, without the fused head."""

    def _compute_loss(self, model, inputs, return_outputs):
        loss = super()._compute_loss(model, inputs, return_outputs)
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return loss + 0.01 * logits.logsumexp(-1)[inputs["attention_mask"] > 0].square().mean()


class InHalves(DPOTrainer):
    """Calls the model separately for chosen and rejected rows: no rows of a call share a prompt."""

    def _compute_loss(self, model, inputs, return_outputs):
        sums = []
        for half in range(2):
            batch = {name: tensor.chunk(2)[half] for name, tensor in inputs.items()}
            labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, -100)
            sums.append(model(**batch, labels=labels, fused_lm_head=True).log_probs.sum(1))
        return -torch.nn.functional.logsigmoid(0.1 * (sums[0] - sums[1])).mean()


@pytest.mark.parametrize(
    ("subclass", "pairs", "calls"),
    [
        (WithLogits, 4, dict(policy=3, reference=3)),  # the second call is an ordinary one and not counted
        (InHalves, 4, dict(policy=6)),
        (InHalves, 3, dict(policy=6)),
    ],
)
def test_subclass(both, subclass, pairs, calls):
    assert_trained_alike(both(trainer_class=subclass, per_device_train_batch_size=pairs), **calls)
