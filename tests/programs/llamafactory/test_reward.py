"""LLaMA-Factory's stage of reward models: patched equals stock.

Its value head has dropout, which a fused training draws for the last tokens alone. The tests compare trainings
without it.
"""

import pytest
import torch
from llamafactory.train.rm import trainer as rm_trainer
from llamafactory_runs import FUSED, LORA, assert_stock, train_both
from safetensors.torch import load_file

from tests.support.comparison import assert_same_in_low_precision

FUSED = FUSED["rm"]
WITHOUT_DROPOUT = dict(summary_dropout_prob=0.0)


@pytest.fixture
def both(tmp_path):
    """A function that trains stock, then patched, without dropout of the value head."""

    def run(kind="llama", tiny=None, **options):
        return train_both(tmp_path, "rm", kind, WITHOUT_DROPOUT | (tiny or {}), **options)

    return run


def test_bf16(both):
    stock, patched = both(bf16=True, use_cpu=True)
    assert_same_in_low_precision(stock, patched, torch.bfloat16, pytest.fail)
    assert patched.calls == FUSED


def test_the_value_head_is_saved(both, tmp_path):
    both(**LORA, save_strategy="steps", save_steps=2)
    saved = load_file(tmp_path / "out" / "checkpoint-2" / "value_head.safetensors")
    assert saved.keys() == {"v_head.summary.weight", "v_head.summary.bias"}
    assert (tmp_path / "out" / "checkpoint-2" / "adapter_model.safetensors").exists()


def test_dropout_of_the_value_head(tmp_path):
    """With it, which is LLaMA-Factory's default, a training is fused, and is another one."""
    without, dropped = (train_both(tmp_path, "rm", tiny=tiny)[1] for tiny in (WITHOUT_DROPOUT, {}))
    assert without.calls == dropped.calls == FUSED
    assert without.logs[0]["loss"] != dropped.logs[0]["loss"]


class Scaled(rm_trainer.PairwiseTrainer):
    """Computes from other values than the trainer does."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        *_, values = model(**inputs, output_hidden_states=True, return_dict=True, use_cache=False)
        chosen, rejected = values.mean(1).chunk(2)
        loss = (rejected - chosen).exp().mean()
        return (loss, (loss, chosen, rejected)) if return_outputs else loss


def test_a_subclass_that_scores_by_itself(both, caplog, monkeypatch):
    monkeypatch.setattr("llamafactory.train.rm.workflow.PairwiseTrainer", Scaled)
    stock, patched = both()
    assert_stock(stock, patched)
    assert not patched.calls
    reason = "no call of the policy has reached fastdpo in the first step; Scaled overrides compute_loss"
    assert caplog.text.count(reason) == caplog.text.count("not fused") == 1
