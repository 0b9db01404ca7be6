"""What a training logs, models that fail the probe, and unusual calls of the patched forward."""

from collections import Counter
from unittest import mock

import pytest
import torch
from datasets import Dataset
from trl import DPOTrainer

import fastdpo
from fastdpo.models import calls as counters
from tests.contract.trainers.trl.dpo import LOSSES, OF_TRL
from tests.support import faults
from tests.support.comparison import assert_trained_alike
from tests.support.trl.dpo import adapter, assert_fused, assert_same_bits, build, tiny_model, train


def test_every_loss_of_trl_is_trained():
    assert OF_TRL
    assert set(OF_TRL) <= LOSSES.keys()


def test_equal_weights_give_a_margin_of_exactly_zero(tmp_path):
    with fastdpo.patched():
        run = train(tmp_path, tiny_model(seed=0), tiny_model(seed=0), max_steps=1)
    assert run.logs[0]["rewards/margins"] == run.logs[0]["rewards/chosen"] == 0.0


# A line names kinds in the order in which this process has counted them first.
@mock.patch.dict(fastdpo.calls, clear=True)
def test_the_log_says_how_much_was_computed(tmp_path, caplog):
    caplog.set_level("INFO", logger="fastdpo")
    rows = [dict(prompt=f"w{i} w2 w3 ", chosen="w4 w5", rejected="w6") for i in range(10, 14)]
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(
            tmp_path, tiny_model(), tiny_model(), per_device_train_batch_size=2, max_steps=2, logging_steps=1
        )
        trainer.train_dataset = trainer._prepare_dataset(
            Dataset.from_list(rows), trainer.processing_class, trainer.args, "train"
        )
        trainer.train()
    padded, distinct = 2 * (3 + 2 + 1), 3 + 2 + 1  # of a pair; nothing is scored behind its end tokens
    given, computed = (2 * 2 * n for n in (padded, distinct))  # models and pairs of a step
    unshared = 2 * 2 * (5 + 4)
    lines = [record.message for record in caplog.records if "padded tokens" in record.message]
    assert lines == [
        f"fastdpo: trl.DPOTrainer calls: policy fused {n}, reference fused {n}; "
        f"100% of calls fused, {computed / given:.0%} of {n * given} padded tokens computed "
        f"({unshared / given:.0%} without sharing)"
        for n in (1, 2)
    ]


class WithoutGradients(DPOTrainer):
    """Computes losses alone, as zeroth-order optimizers need them."""

    def training_step(self, model, inputs, *args):
        with torch.no_grad():
            return self.compute_loss(model.train(), self._prepare_inputs(inputs))


@pytest.mark.parametrize("options", [{}, adapter()], ids=["full", "LoRA"])
def test_a_policy_that_trains_without_gradients_is_no_reference(tmp_path, options):
    models = [tiny_model(), None if options else tiny_model(seed=1)]
    options = {name: x for name, x in options.items() if name != "reference"}
    with fastdpo.patched("trl.DPOTrainer"):
        assert_fused(train(tmp_path, *models, trainer_class=WithoutGradients, **options), policy=3, reference=3)


def test_a_line_of_calls_that_fell_back(monkeypatch):
    calls = Counter({("x", "policy", "fused"): 3, ("x", "eval", "stock"): 1})
    monkeypatch.setattr(counters, "calls", calls)
    assert counters.calls_line("x") == "fastdpo: x calls: policy fused 3, eval stock 1; 75% of calls fused"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sabotage", [faults.late_positions, faults.no_prefix, faults.leak])
def test_a_model_that_fails_the_probe_trains_like_stock(both, monkeypatch, caplog, sabotage, dtype):
    sabotage(monkeypatch)
    runs = both(max_steps=1, prepare=lambda model: model.to(dtype))
    assert_trained_alike(runs, {("policy", "stock"): 1, ("reference", "stock"): 1}, same=assert_same_bits)
    assert caplog.text.count("the packed hidden states of LlamaForCausalLM differ from its padded ones") == 2
