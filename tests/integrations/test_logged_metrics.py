"""Logged metrics equal those of TRL, and those of all ranks where TRL leaves out some."""

import contextlib
import copy
import gc
import json
from collections import defaultdict, deque

import pytest
from transformers import TrainerCallback
from trl import DPOTrainer

import fastdpo
from tests.support.comparison import RELATIVE, approximately
from tests.support.recorded_calls import recorded_calls
from tests.support.trl.dpo import build, run_two_ranks, tiny_model


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    fastdpo.unpatch()
    gc.collect()  # trainers and callbacks that refer to each other


@pytest.fixture
def both(tmp_path):
    """A function that trains with a class, and a callback of a class, and compares the logged metrics with those of
    stock. Returns the stock and the patched trainer.
    """

    def train(trainer_class=DPOTrainer, callback_class=None) -> list[DPOTrainer]:
        trainers = []
        for patch in (contextlib.nullcontext(), fastdpo.patched("trl.DPOTrainer")):
            with patch:
                trainer = build(
                    tmp_path, tiny_model(), tiny_model(seed=1), 16, trainer_class=trainer_class, logging_steps=3
                )
                if callback_class is not None:
                    trainer.callback = callback_class(trainer)
                    trainer.add_callback(trainer.callback)
                trainer.train()
                trainers.append(trainer)
        for a, b in zip(*map(logs_of, trainers), strict=True):
            assert b == approximately(a)
        return trainers

    return train


def logs_of(trainer) -> list[dict]:
    return [{k: v for k, v in log.items() if "/" in k or k == "num_tokens"} for log in trainer.state.log_history]


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


def test_a_subclass_that_reads_metrics_decides_like_stock(both):
    stock, patched = both(DecidesByMetrics)
    assert stock.decisions == patched.decisions
    assert {decision[0] for decision in stock.decisions[::2]} == {True, False}, "both decisions must occur"


class OfATrainer(TrainerCallback):
    def __init__(self, trainer):
        self.trainer, self.lengths = trainer, []


class Keeps(OfATrainer):
    """Keeps a reference to the metrics and reads them after each step."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.metrics = self.trainer._metrics["train"]

    def on_step_end(self, args, state, control, **kwargs):
        self.lengths.append({name: (len(values), type(values[-1])) for name, values in self.metrics.items()})


class Adds(OfATrainer):
    """Writes to a running total and deep-copies the metrics."""

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer._total_train_tokens += 1000
        metrics = copy.deepcopy(self.trainer._metrics)
        assert all(type(x) in (float, int) for values in metrics["train"].values() for x in values)


class Logs(OfATrainer):
    """Logs after each step, which consumes metrics."""

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.log({"of the callback": float(state.global_step)})


@pytest.mark.parametrize("callback_class", [Keeps, Adds, Logs])
def test_a_callback_that_reads_or_writes_metrics(both, callback_class):
    stock, patched = both(callback_class=callback_class)
    assert stock.callback.lengths == patched.callback.lengths


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
def test_a_subclass_with_custom_metrics(both, trainer_class):
    gathered = [vars(trainer).get("gathered", []) for trainer in both(trainer_class)]
    assert gathered[1] == pytest.approx(gathered[0], rel=RELATIVE, abs=RELATIVE)
    assert bool(gathered[0]) == (trainer_class is Gathering)


def test_a_loss_function_replaced_before_patching_sees_tensors(both, monkeypatch):
    def largest_of_ranks(loss, trainer, *args):
        return trainer.accelerator.gather(loss.detach()).max().item()

    largest = recorded_calls(monkeypatch, DPOTrainer, "_compute_loss", largest_of_ranks)
    both()
    assert largest[3:] == approximately(largest[:3])


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
