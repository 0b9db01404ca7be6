"""What only TRL's RewardTrainer has: its batches, scores and subclasses."""

import functools

import pytest
import torch
from transformers import TrainerCallback
from trl import RewardTrainer

from fastdpo.models import reward_head
from fastdpo.packing import IGNORE_INDEX
from tests.contract.trainers.trl.reward import FULL
from tests.support.comparison import assert_close, assert_trained_alike
from tests.support.trl.dpo import assert_same_bits, tokenizer
from tests.support.trl.reward import reward_model, train_both_rewards


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_rewards, tmp_path)


class ShortenedUnseen(RewardTrainer):
    """The last tokens of rows become padding after their collation, by a write that raises no version."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["input_ids"].data[:, 6:] = 0
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_batches_that_other_code_has_changed(both):
    assert_trained_alike(both(trainer_class=ShortenedUnseen), **FULL)


class PaddingIsEnd(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.config.pad_token_id = tokenizer().eos_token_id


def test_tokens_other_than_those_that_batches_came_with_are_scored(both):
    rows = [dict(prompt=f"w{i} w2 ", chosen=f"w{i + 1} w5", rejected=f"w{i + 2} w6") for i in range(16)]
    assert_trained_alike(both(data=rows, callbacks=[PaddingIsEnd()]), **FULL)


def test_a_loss_of_the_model_itself(both, caplog):
    """A call with labels falls back, and computes its loss from them."""

    class Regression(RewardTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["input_ids"][:, 0] / 10
            return model(**inputs, labels=labels, use_cache=False).loss

    assert_trained_alike(both(trainer_class=Regression), {("policy", "stock"): 3}, same=assert_same_bits)
    assert caplog.text.count("trl.RewardTrainer (policy): not fused, argument labels is not supported yet") == 1


IDS = torch.tensor([[0, 5, 6, 0, 7], [5, 6, 7, 0, 0], [0, 0, 0, 0, 0]])


@pytest.mark.parametrize(("padding", "rows", "last"), [(0, 3, [4, 2, 0]), (7, 3, [3, 4, 4]), (None, 1, [4])])
def test_the_scored_token_is_that_of_the_class(padding, rows, last):
    """The last one whose id is not that of padding, whatever the attention mask says."""
    model = reward_model()
    model.config.pad_token_id = padding
    ids = IDS[:rows]
    labels = reward_head.CLASSIFIER_HEAD.with_scored_tokens(model, dict(input_ids=ids))["shift_labels"]
    assert (labels != IGNORE_INDEX).nonzero().tolist() == [[i, x] for i, x in enumerate(last)]
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        expected = model(ids).logits.flatten()
        assert_close(reward_head.CLASSIFIER_HEAD.scores(model, hidden[range(rows), last]), expected)
