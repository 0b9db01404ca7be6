"""Logged metrics equal those of TRL, and those of all ranks where TRL leaves out some."""

import contextlib
import copy
import gc
import json
from collections import defaultdict, deque

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from trl import DPOTrainer

import fastdpo
from fastdpo.integrations.trl.gathering import of_all_ranks
from tests.support.comparison import RELATIVE, approximately
from tests.support.trl.dpo import build, run_two_ranks, tiny_model
from tests.support.trl.online import build as build_online
from tests.support.trl.online import writer


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    fastdpo.unpatch()
    gc.collect()  # trainers and callbacks that refer to each other


def test_a_custom_gather_function_is_kept():
    accelerator = Accelerator(cpu=True)
    accelerator.gather = custom = lambda x: x
    with of_all_ranks(accelerator):
        assert accelerator.gather is custom, "a custom function must not be replaced"
    assert accelerator.gather is custom
    assert "gather_for_metrics" not in vars(accelerator)


def test_the_functions_of_accelerate_are_restored():
    accelerator = Accelerator(cpu=True)
    with of_all_ranks(accelerator, gather=lambda x: 2 * x):
        assert accelerator.gather(1) == accelerator.gather_for_metrics(1, use_gather_object=False) == 2
    assert vars(accelerator).keys().isdisjoint({"gather", "gather_for_metrics"})
    assert torch.equal(accelerator.gather(torch.ones(3)), torch.ones(3))


class Peek(TrainerCallback):
    """Records the types and lengths of the metrics after each step."""

    def __init__(self, metrics):
        self.metrics, self.kinds, self.lengths = metrics, [], []

    def on_step_end(self, args, state, control, **kwargs):
        lists = self.metrics().values()
        self.kinds.append({type(x) for values in lists for x in values})
        self.lengths.append({len(values) for values in lists})


def test_a_callback_sees_what_it_sees_in_stock(tmp_path):
    seen = []
    for patch in (contextlib.nullcontext, fastdpo.patched):
        with patch():
            trainer = build(tmp_path / patch.__name__, tiny_model(), tiny_model(seed=1), 16, logging_steps=3)
            peek = Peek(lambda trainer=trainer: trainer._metrics["train"])
            trainer.add_callback(peek)
            trainer.train()
        seen.append((peek.kinds, peek.lengths))
        assert type(trainer._total_train_tokens) is int
    assert seen[0] == seen[1]
    assert seen[1][1] == [{1}, {1, 2}, {1, 3}], "one number of tokens; of the others, one value per step"


def test_after_unpatching_during_training_numbers_are_plain(tmp_path):
    fastdpo.patch("trl.DPOTrainer")
    trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 16, logging_steps=3)

    class Unpatch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            fastdpo.unpatch()

    peek = Peek(lambda: trainer._metrics["train"])
    trainer.add_callback(Unpatch())
    trainer.add_callback(peek)
    trainer.train()
    assert set().union(*peek.kinds) <= {float, int}
    assert trainer.state.log_history[0]["num_tokens"] > 0


class DecidesByMetrics(DPOTrainer):
    """Makes decisions from the latest metrics, as early stopping and curricula do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decisions = []

    def _compute_loss(self, model, inputs, return_outputs):
        loss = super()._compute_loss(model, inputs, return_outputs)
        latest = {name: values[-1] for name, values in self._metrics["train"].items()}
        is_accurate = latest["rewards/accuracies"] > 0.6
        self.decisions.append((is_accurate, latest["logps/chosen"] < 0, self._total_train_tokens))
        self.decisions.append(json.dumps({name: round(abs(-x) * 2, 3) for name, x in latest.items()}))
        return loss


def test_a_subclass_that_reads_metrics_decides_like_stock(tmp_path):
    results = {}
    for name in ("stock", "patched"):
        if name == "patched":
            fastdpo.patch("trl.DPOTrainer")
        trainer = build(
            tmp_path / name, tiny_model(), tiny_model(seed=1), 16, trainer_class=DecidesByMetrics, logging_steps=3
        )
        trainer.train()
        results[name] = trainer.decisions, trainer.state.log_history[0]
    (stock, log), (patched, patched_log) = results.values()
    assert stock == patched
    assert {decision[0] for decision in stock[::2]} == {True, False}, "both decisions must occur"
    names = [name for name in log if "runtime" not in name and "per_second" not in name]
    assert [patched_log[name] for name in names] == [approximately(log[name]) for name in names]


def trained(directory, trainer_class=DPOTrainer, callback=None, **options) -> DPOTrainer:
    trainer = build(directory, tiny_model(), tiny_model(seed=1), 16, trainer_class=trainer_class, **options)
    if callback is not None:
        callback.trainer = trainer
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def logs_of(trainer) -> list[dict]:
    return [{k: v for k, v in log.items() if "/" in k or k == "num_tokens"} for log in trainer.state.log_history]


class Keeps(TrainerCallback):
    """Keeps a reference to the metrics and reads them after each step."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.metrics, self.lengths = self.trainer._metrics["train"], []

    def on_step_end(self, args, state, control, **kwargs):
        self.lengths.append({name: (len(values), type(values[-1])) for name, values in self.metrics.items()})


class Adds(TrainerCallback):
    """Writes to a running total and deep-copies the metrics."""

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer._total_train_tokens += 1000
        metrics = copy.deepcopy(self.trainer._metrics)
        assert all(type(x) in (float, int) for values in metrics["train"].values() for x in values)


class Logs(TrainerCallback):
    """Logs after each step, which consumes metrics."""

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.log({"of the callback": float(state.global_step)})


@pytest.mark.parametrize("callback", [Keeps, Adds, Logs])
def test_a_callback_that_reads_or_writes_metrics(tmp_path, callback):
    stock_callback, patched_callback = callback(), callback()
    stock = trained(tmp_path / "stock", callback=stock_callback, logging_steps=3)
    with fastdpo.patched("trl.DPOTrainer"):
        patched = trained(tmp_path / "patched", callback=patched_callback, logging_steps=3)
    assert vars(patched_callback).get("lengths") == vars(stock_callback).get("lengths")
    for a, b in zip(logs_of(stock), logs_of(patched), strict=True):
        assert b == approximately(a)


class Windowed(DPOTrainer):
    """Keeps only the latest values, in custom containers behind a custom property."""

    @property
    def _metrics(self):
        return vars(self).setdefault("kept", {mode: defaultdict(lambda: deque(maxlen=2)) for mode in ("train", "eval")})

    @_metrics.setter
    def _metrics(self, value):
        pass


class Gathering(DPOTrainer):
    """Records the sum of each gathered tensor."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gathered, stock = [], self.accelerator.gather_for_metrics
        self.accelerator.gather_for_metrics = lambda x, *args: self.gathered.append(x.sum().item()) or stock(x, *args)


@pytest.mark.parametrize("trainer_class", [Windowed, Gathering])
def test_a_subclass_with_custom_metrics(tmp_path, trainer_class):
    stock = trained(tmp_path / "stock", trainer_class, logging_steps=3)
    with fastdpo.patched("trl.DPOTrainer"):
        patched = trained(tmp_path / "patched", trainer_class, logging_steps=3)
    for a, b in zip(logs_of(stock), logs_of(patched), strict=True):
        assert b == approximately(a)
    gathered = [vars(trainer).get("gathered", []) for trainer in (stock, patched)]
    assert gathered[1] == pytest.approx(gathered[0], rel=RELATIVE, abs=RELATIVE)
    assert bool(gathered[0]) == (trainer_class is Gathering)


def test_a_loss_function_replaced_before_patching_sees_tensors(tmp_path, monkeypatch):
    largest, original = [], DPOTrainer._compute_loss

    def compute_loss_and_record_it(self, model, inputs, return_outputs):
        loss = original(self, model, inputs, return_outputs)
        largest.append(self.accelerator.gather(loss.detach()).max().item())
        return loss

    monkeypatch.setattr(DPOTrainer, "_compute_loss", compute_loss_and_record_it)
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = trained(tmp_path)
    assert largest == pytest.approx([log["loss"] for log in trainer.state.log_history if "loss" in log])


def test_online_dpo_shows_numbers(tmp_path):
    with fastdpo.patched("trl.OnlineDPOTrainer"):
        trainer = build_online(tmp_path, writer(0), writer(1), logging_steps=3)
        peek = Peek(lambda: trainer.stats)
        trainer.add_callback(peek)
        trainer.train()
    assert peek.kinds == [{float}] * 3


MISSING_SECOND_RANK = {"eval_entropy", "eval_logits/chosen", "eval_logits/rejected", "eval_mean_token_accuracy"}
"""Metrics from which stock drops the second rank when the last batch of two ranks has one row."""


def test_two_ranks(tmp_path):
    """The logs equal stock's of all ranks, and each step has the collectives of stock."""
    stock, uncut, patched = (run_two_ranks(kind, tmp_path) for kind in ("stock", "uncut", "patched"))
    assert patched[0]["logs"] == patched[1]["logs"]
    different = set()
    for a, b, c in zip(stock[0]["logs"], uncut[0]["logs"], patched[0]["logs"], strict=True):
        assert a.keys() == b.keys() == c.keys()
        of_trl = [{name: x for name, x in log.items() if name != "eval_loss"} for log in (b, c)]
        assert of_trl[1] == approximately(of_trl[0])
        different |= {name for name in a if c[name] != approximately(a[name])}
    assert different == MISSING_SECOND_RANK
    assert patched[0]["counts"] == stock[0]["counts"]
