"""Metrics that TRL gathers and reads in every step are reduced once per log, with equal results.

Code that reads the metrics between two logs sees plain numbers, as with stock trainers.
"""

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
from fastdpo.integrations import ledger as ledger_module
from fastdpo.integrations.deferred_metrics import codes_of, deferring
from fastdpo.integrations.ledger import Gathered, Ledger, Number
from tests.support.comparison import RELATIVE, approximately
from tests.support.trl.dpo import assert_same, build, run_two_ranks, tiny_model, train
from tests.support.trl.online import build as build_online
from tests.support.trl.online import writer
from tests.support.workers import ledger as worker
from tests.support.workers.processes import run_ranks


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    fastdpo.unpatch()
    gc.collect()  # trainers and callbacks that refer to each other


def metrics_of(accelerator, x, y, weight) -> dict:
    """Every operation that the trainers apply to gathered tensors."""
    total = accelerator.gather_for_metrics(weight).sum()
    margin = accelerator.gather(x) - accelerator.gather_for_metrics(y)
    return {
        "mean": accelerator.gather(x).mean().item(),
        "sum": accelerator.gather_for_metrics(x).sum().item(),
        "ratio": (accelerator.gather_for_metrics(x).sum() / total).item() if total > 0 else 0.0,
        "of numbers": accelerator.gather(x).sum().item() / accelerator.gather(weight).sum().item(),
        "halves": accelerator.gather(weight).sum().item() // 2,
        "margin": margin.mean().item(),
        "accuracy": (margin > 0).float().mean().item(),
    }


def deferred(accelerator, *values) -> tuple[Ledger, dict]:
    ledger = Ledger()
    with deferring(accelerator, ledger, codes_of(metrics_of, __name__)):
        metrics = metrics_of(accelerator, *values)
    assert all(isinstance(x, Number) for x in metrics.values())
    return ledger, metrics


@pytest.mark.parametrize("read", [Ledger.show, Ledger.settle])
def test_deferred_numbers_equal_those_of_plain_code(read):
    accelerator = Accelerator(cpu=True)
    values = torch.randn(3, 5), torch.randn(3, 5), torch.randint(1, 9, (7,))
    expected, gather = metrics_of(accelerator, *values), accelerator.gather
    ledger, metrics = deferred(accelerator, *values)
    assert accelerator.gather == gather
    lists = {name: [1.5, x] for name, x in metrics.items()}
    ledger.take(lists)
    assert set(map(tuple, lists.values())) == {(1.5,)}
    read(ledger)
    for name, value in expected.items():
        assert lists[name] == [1.5, pytest.approx(value, rel=1e-6)], name
        assert type(lists[name][1]) is type(value), name


def test_a_division_by_zero_gives_zero():
    ledger, metrics = deferred(Accelerator(cpu=True), torch.ones(2), torch.ones(2), torch.zeros(2))
    settled = ledger.settled(metrics)
    assert settled["ratio"] == settled["of numbers"] == 0.0


def test_functions_called_by_the_deferred_code_gather_immediately():
    accelerator, ledger = Accelerator(cpu=True), Ledger()

    def other_function():
        return accelerator.gather(torch.ones(3)), accelerator.gather_for_metrics(torch.ones(3))

    def stock():
        assert isinstance(accelerator.gather(torch.ones(3)), Gathered)
        assert all(isinstance(accelerator.gather(torch.ones(3)), Gathered) for _ in range(2))
        return other_function()

    with deferring(accelerator, ledger, codes_of(stock, __name__)):
        assert all(torch.equal(x, torch.ones(3)) for x in stock())


def numbers_of(ledger: Ledger, *values: float) -> list[Number]:
    return [Gathered(ledger, torch.tensor([x])).sum() for x in values]


def test_a_list_changed_by_other_code_is_not_overwritten():
    ledger = Ledger()
    kept, changed, emptied = metrics = [[x] for x in numbers_of(ledger, 1.0, 2.0, 3.0)]
    ledger.take(dict(enumerate(metrics)))
    ledger.show()
    assert metrics == [[1.0], [2.0], [3.0]]
    changed[0] = 7.0
    emptied.clear()
    ledger.settle()
    assert (kept, changed, emptied) == ([1.0], [7.0], [])


def test_local_values_are_replaced_by_those_of_all_ranks(tmp_path):
    run_ranks(2, worker.show_and_settle, tmp_path)
    for rank in range(2):
        values = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert values == {"shown": [1.0 + rank], "settled": [1.0 + 2.0, 5.0 + 6.0]}


def test_a_trainer_that_never_logs_keeps_a_bounded_number_of_sums(monkeypatch):
    monkeypatch.setattr(ledger_module, "LIMIT", 64)  # instead of 2048 sums, which take hundreds of steps
    ledger, values, total = Ledger(), [], 0
    for i in range(3000):
        (number,) = numbers_of(ledger, i)
        total = total + number
        ledger.running["total"] = total
        values.append(number)
        ledger.take({"x": values})
        ledger.settle_if_due(read=False)
        total = ledger.running["total"]
        assert i - len(values) <= 64
    assert ledger.shown("total") == sum(range(3000))
    assert values == list(range(3000))


def test_a_custom_gather_function_is_kept():
    accelerator = Accelerator(cpu=True)
    accelerator.gather = custom = lambda x: x
    with deferring(accelerator, Ledger(), codes_of(metrics_of, __name__)):
        assert accelerator.gather is custom, "a custom function must not be replaced"
    assert accelerator.gather is custom
    assert "gather_for_metrics" not in vars(accelerator)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_dpo_logs_equal_those_of_stock(tmp_path, every):
    options = dict(logging_steps=every, max_steps=5, gradient_accumulation_steps=2, evaluate=7, eval_strategy="epoch")
    stock = train(tmp_path / "stock", tiny_model(), tiny_model(seed=1), **options)
    with fastdpo.patched("trl.DPOTrainer"):
        patched = train(tmp_path / "patched", tiny_model(), tiny_model(seed=1), **options)
    assert_same(stock, patched)


class Peek(TrainerCallback):
    """Records the types and lengths of the metrics after each step."""

    def __init__(self, metrics):
        self.metrics, self.kinds, self.lengths = metrics, [], []

    def on_step_end(self, args, state, control, **kwargs):
        lists = self.metrics().values()
        self.kinds.append({type(x) for values in lists for x in values})
        self.lengths.append({len(values) for values in lists})


@pytest.fixture
def reads(monkeypatch):
    """Records the reads of sums from the device."""
    seen, read = [], ledger_module.read_into

    def counting(field, steps, reduce):
        seen.extend([field] * bool(steps))
        read(field, steps, reduce)

    monkeypatch.setattr(ledger_module, "read_into", counting)
    return seen


def test_nothing_is_read_before_a_log(tmp_path, reads):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 16, logging_steps=3)
        trainer.train()
    assert reads == ["reduced"]
    (log, _) = trainer.state.log_history
    assert all(type(x) in (float, int) for x in log.values())
    assert type(trainer._total_train_tokens) is int


def test_a_callback_sees_numbers(tmp_path, reads):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 16, logging_steps=3)
        peek = Peek(lambda: trainer._metrics["train"])
        trainer.add_callback(peek)
        trainer.train()
    assert peek.kinds == [{float, int}] * 3
    assert peek.lengths == [{1}, {1, 2}, {1, 3}], "one number of tokens; of the others, one value per step"
    assert reads == ["own"] * 3 + ["reduced"]


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


class LoggingCallback(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.log({"of the callback": float(state.global_step)})


def test_a_callback_that_logs_consumes_the_same_metrics_as_in_stock(tmp_path):
    logs = []
    for name in ("stock", "patched"):
        if name == "patched":
            fastdpo.patch("trl.DPOTrainer")
        trainer = build(tmp_path / name, tiny_model(), tiny_model(seed=1), 16, logging_steps=2)
        callback = LoggingCallback()
        callback.trainer = trainer
        trainer.add_callback(callback)
        trainer.train()
        logs.append(
            [{k: v for k, v in log.items() if "/" in k or k == "num_tokens"} for log in trainer.state.log_history]
        )
    assert len(logs[0]) == len(logs[1])
    for stock, patched in zip(*logs, strict=True):
        assert patched == approximately(stock)


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


@pytest.mark.parametrize("callback", [Keeps, Adds])
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


def test_a_copied_ledger_has_the_same_numbers(tmp_path):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 16)
        batch = trainer.data_collator(list(trainer.train_dataset)[:4])
        trainer.compute_loss(trainer.model, batch)
        copied = copy.deepcopy(vars(trainer)["_fastdpo_state"].ledger)
        assert copied.shown("_total_train_tokens") == trainer._total_train_tokens > 0


def test_online_dpo_reads_nothing_before_a_log(tmp_path, reads):
    with fastdpo.patched("trl.OnlineDPOTrainer"):
        trainer = build_online(tmp_path, writer(0), writer(1), logging_steps=3)
        trainer.train()
    assert reads == ["reduced"]
    assert all(isinstance(x, (float, int)) for x in trainer.state.log_history[0].values())


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
    """The logs equal stock's, with one collective per log instead of fifteen per step."""
    stock, uncut, patched = (run_two_ranks(kind, tmp_path) for kind in ("stock", "uncut", "patched"))
    assert patched[0]["logs"] == patched[1]["logs"]
    different = set()
    for a, b, c in zip(stock[0]["logs"], uncut[0]["logs"], patched[0]["logs"], strict=True):
        assert a.keys() == b.keys() == c.keys()
        of_trl = [{name: x for name, x in log.items() if name != "eval_loss"} for log in (b, c)]
        assert of_trl[1] == approximately(of_trl[0])
        different |= {name for name in a if c[name] != approximately(a[name])}
    assert different == MISSING_SECOND_RANK

    # Training: six steps and two logs; Trainer itself runs two collectives per log. Evaluation: two
    # steps; Trainer itself runs one collective per step.
    assert [sum(run[0]["counts"][:6]) for run in (stock, patched)] == [6 * 15 + 2 * 2, 2 * (2 + 1)]
    assert [run[0]["counts"][-1] for run in (stock, patched)] == [2 * (14 + 1), 2 * 1 + 1]
