"""Metrics that TRL gathers and reads every step are reduced once a log, with the same values and types."""

import copy
import gc
import json
from collections import defaultdict, deque

import ledger_worker
import pytest
import torch
from accelerate import Accelerator
from comparison import RELATIVE, approximately
from rank_processes import run_ranks
from transformers import TrainerCallback
from trl import DPOTrainer
from trl_online_runs import build as build_online
from trl_online_runs import writer
from trl_runs import assert_same, build, run_two_ranks, tiny_model, train

import fastdpo
from fastdpo.integrations import deferred_metrics
from fastdpo.integrations.deferred_metrics import Gathered, Ledger, Number, codes_of, deferring


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    fastdpo.unpatch()
    gc.collect()  # trainers that hold callbacks that hold them


def metrics_of(accelerator, x, y, weight) -> dict:
    """All that the trainers do with what they gather."""
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
        found = metrics_of(accelerator, *values)
    assert all(isinstance(x, Number) for x in found.values())
    return ledger, found


@pytest.mark.parametrize("read", [Ledger.show, Ledger.settle])
def test_numbers_are_those_of_plain_code(read):
    accelerator = Accelerator(cpu=True)
    values = torch.randn(3, 5), torch.randn(3, 5), torch.randint(1, 9, (7,))
    expected, gather = metrics_of(accelerator, *values), accelerator.gather
    ledger, found = deferred(accelerator, *values)
    assert accelerator.gather == gather
    lists = {name: [1.5, x] for name, x in found.items()}
    ledger.take(lists)
    assert set(map(tuple, lists.values())) == {(1.5,)}
    read(ledger)
    for name, value in expected.items():
        assert lists[name] == [1.5, pytest.approx(value, rel=1e-6)], name
        assert type(lists[name][1]) is type(value), name


def test_a_quotient_by_nothing_is_zero():
    ledger, found = deferred(Accelerator(cpu=True), torch.ones(2), torch.ones(2), torch.zeros(2))
    known = ledger.settled(found)
    assert known["ratio"] == known["of numbers"] == 0.0


def test_what_the_function_calls_gathers_for_real():
    accelerator, ledger = Accelerator(cpu=True), Ledger()

    def of_somebody_else():
        return accelerator.gather(torch.ones(3)), accelerator.gather_for_metrics(torch.ones(3))

    def stock():
        assert isinstance(accelerator.gather(torch.ones(3)), Gathered)
        assert all(isinstance(accelerator.gather(torch.ones(3)), Gathered) for _ in range(2))
        return of_somebody_else()

    with deferring(accelerator, ledger, codes_of(stock, __name__)):
        assert all(torch.equal(x, torch.ones(3)) for x in stock())


def numbers_of(ledger: Ledger, *values: float) -> list[Number]:
    return [Gathered(ledger, torch.tensor([x])).sum() for x in values]


def test_a_list_that_somebody_has_changed_is_left_as_it_is():
    ledger = Ledger()
    kept, changed, emptied = metrics = [[x] for x in numbers_of(ledger, 1.0, 2.0, 3.0)]
    ledger.take(dict(enumerate(metrics)))
    ledger.show()
    assert metrics == [[1.0], [2.0], [3.0]]
    changed[0] = 7.0
    emptied.clear()
    ledger.settle()
    assert (kept, changed, emptied) == ([1.0], [7.0], [])


def test_shown_values_are_replaced_by_those_of_all_ranks(tmp_path):
    run_ranks(2, ledger_worker.show_and_settle, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == {"shown": [1.0 + rank], "settled": [1.0 + 2.0, 5.0 + 6.0]}


def test_a_trainer_that_never_logs_keeps_little(monkeypatch):
    monkeypatch.setattr(deferred_metrics, "LIMIT", 64)  # of 2048 sums, which take a trainer hundreds of steps
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


def test_an_accelerator_of_the_users_own_is_given_back():
    accelerator = Accelerator(cpu=True)
    accelerator.gather = mine = lambda x: x
    with deferring(accelerator, Ledger(), codes_of(metrics_of, __name__)):
        assert accelerator.gather is mine, "what they gather is theirs"
    assert accelerator.gather is mine
    assert "gather_for_metrics" not in vars(accelerator)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_dpo_logs_are_stocks(tmp_path, every):
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
    """How often sums were read from the device so far."""
    seen, read = [], deferred_metrics._read_into

    def counting(field, steps, reduce):
        seen.extend([field] * bool(steps))
        read(field, steps, reduce)

    monkeypatch.setattr(deferred_metrics, "_read_into", counting)
    return seen


def test_nothing_is_read_before_a_log(tmp_path, reads):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 16, logging_steps=3)
        trainer.train()
    assert reads == ["reduced"]
    (log, _) = trainer.state.log_history
    assert all(type(x) in (float, int) for x in log.values())
    assert type(trainer._total_train_tokens) is int


def test_whoever_looks_sees_numbers(tmp_path, reads):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 16, logging_steps=3)
        peek = Peek(lambda: trainer._metrics["train"])
        trainer.add_callback(peek)
        trainer.train()
    assert peek.kinds == [{float, int}] * 3
    assert peek.lengths == [{1}, {1, 2}, {1, 3}], "the number of tokens is one, of the others there is one a step"
    assert reads == ["own"] * 3 + ["reduced"]


def test_unpatched_in_the_middle_numbers_are_plain(tmp_path):
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


class Asking(DPOTrainer):
    """Decides by what stock has just computed, as early stopping and curricula do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.answers = []

    def _compute_loss(self, model, inputs, return_outputs):
        loss = super()._compute_loss(model, inputs, return_outputs)
        latest = {name: values[-1] for name, values in self._metrics["train"].items()}
        self.answers.append((latest["rewards/accuracies"] > 0.6, latest["logps/chosen"] < 0, self._total_train_tokens))
        self.answers.append(json.dumps({name: round(abs(-x) * 2, 3) for name, x in latest.items()}))
        return loss


def test_a_subclass_decides_as_in_stock(tmp_path):
    found = {}
    for name in ("stock", "patched"):
        if name == "patched":
            fastdpo.patch("trl.DPOTrainer")
        trainer = build(tmp_path / name, tiny_model(), tiny_model(seed=1), 16, trainer_class=Asking, logging_steps=3)
        trainer.train()
        found[name] = trainer.answers, trainer.state.log_history[0]
    (stock, log), (patched, patched_log) = found.values()
    assert stock == patched
    assert {answer[0] for answer in stock[::2]} == {True, False}, "the question must have two answers"
    names = [name for name in log if "runtime" not in name and "per_second" not in name]
    assert [patched_log[name] for name in names] == [approximately(log[name]) for name in names]


class LogsToo(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.log({"of the callback": float(state.global_step)})


def test_a_callback_that_logs_takes_what_stock_gives_it(tmp_path):
    logs = []
    for name in ("stock", "patched"):
        if name == "patched":
            fastdpo.patch("trl.DPOTrainer")
        trainer = build(tmp_path / name, tiny_model(), tiny_model(seed=1), 16, logging_steps=2)
        callback = LogsToo()
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
    """Takes the metrics once, and looks into them after each step."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.metrics, self.lengths = self.trainer._metrics["train"], []

    def on_step_end(self, args, state, control, **kwargs):
        self.lengths.append({name: (len(values), type(values[-1])) for name, values in self.metrics.items()})


class Adds(TrainerCallback):
    """Writes to what stock adds up, and copies the trainer."""

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer._total_train_tokens += 1000
        metrics = copy.deepcopy(self.trainer._metrics)
        assert all(type(x) in (float, int) for values in metrics["train"].values() for x in values)


@pytest.mark.parametrize("callback", [Keeps, Adds])
def test_a_callback_with_a_hand_in_the_metrics(tmp_path, callback):
    stock_callback, patched_callback = callback(), callback()
    stock = trained(tmp_path / "stock", callback=stock_callback, logging_steps=3)
    with fastdpo.patched("trl.DPOTrainer"):
        patched = trained(tmp_path / "patched", callback=patched_callback, logging_steps=3)
    assert vars(patched_callback).get("lengths") == vars(stock_callback).get("lengths")
    for a, b in zip(logs_of(stock), logs_of(patched), strict=True):
        assert b == approximately(a)


class Windowed(DPOTrainer):
    """Keeps its last values in containers of its own, behind a property of its own."""

    @property
    def _metrics(self):
        return vars(self).setdefault("kept", {mode: defaultdict(lambda: deque(maxlen=2)) for mode in ("train", "eval")})

    @_metrics.setter
    def _metrics(self, value):
        pass


class Gathering(DPOTrainer):
    """Sees what is gathered."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gathered, stock = [], self.accelerator.gather_for_metrics
        self.accelerator.gather_for_metrics = lambda x, *args: self.gathered.append(x.sum().item()) or stock(x, *args)


@pytest.mark.parametrize("trainer_class", [Windowed, Gathering])
def test_a_subclass_with_metrics_of_its_own(tmp_path, trainer_class):
    stock = trained(tmp_path / "stock", trainer_class, logging_steps=3)
    with fastdpo.patched("trl.DPOTrainer"):
        patched = trained(tmp_path / "patched", trainer_class, logging_steps=3)
    for a, b in zip(logs_of(stock), logs_of(patched), strict=True):
        assert b == approximately(a)
    gathered = [vars(trainer).get("gathered", []) for trainer in (stock, patched)]
    assert gathered[1] == pytest.approx(gathered[0], rel=RELATIVE, abs=RELATIVE)
    assert bool(gathered[0]) == (trainer_class is Gathering)


def test_a_function_replaced_before_sees_tensors(tmp_path, monkeypatch):
    largest, original = [], DPOTrainer._compute_loss

    def and_the_largest(self, model, inputs, return_outputs):
        loss = original(self, model, inputs, return_outputs)
        largest.append(self.accelerator.gather(loss.detach()).max().item())
        return loss

    monkeypatch.setattr(DPOTrainer, "_compute_loss", and_the_largest)
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = trained(tmp_path)
    assert largest == pytest.approx([log["loss"] for log in trainer.state.log_history if "loss" in log])


def test_a_copied_trainer_has_numbers(tmp_path):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 16)
        batch = trainer.data_collator(list(trainer.train_dataset)[:4])
        trainer.compute_loss(trainer.model, batch)
        own = copy.deepcopy(vars(trainer)["_fastdpo_state"].ledger)
        assert own.shown("_total_train_tokens") == trainer._total_train_tokens > 0


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


CUT = {"eval_entropy", "eval_logits/chosen", "eval_logits/rejected", "eval_mean_token_accuracy"}
"""Metrics from which stock omits the second rank, where one row is left for the last batch of two ranks."""


def test_two_ranks(tmp_path):
    """The logs of stock, at one collective a log in place of fifteen a step."""
    stock, uncut, patched = (run_two_ranks(kind, tmp_path) for kind in ("stock", "uncut", "patched"))
    assert patched[0]["logs"] == patched[1]["logs"]
    different = set()
    for a, b, c in zip(stock[0]["logs"], uncut[0]["logs"], patched[0]["logs"], strict=True):
        assert a.keys() == b.keys() == c.keys()
        of_trl = [{name: x for name, x in log.items() if name != "eval_loss"} for log in (b, c)]
        assert of_trl[1] == approximately(of_trl[0])
        different |= {name for name in a if c[name] != approximately(a[name])}
    assert different == CUT

    # Six steps with the logs between them, two, for which Trainer itself has two collectives; an evaluation of two
    # steps, for which it has one each.
    assert [sum(run[0]["counts"][:6]) for run in (stock, patched)] == [6 * 15 + 2 * 2, 2 * (2 + 1)]
    assert [run[0]["counts"][-1] for run in (stock, patched)] == [2 * (14 + 1), 2 * 1 + 1]
