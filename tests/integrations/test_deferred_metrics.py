"""What TRL's trainers gather and read every step is reduced once a log, and is the same."""

import gc

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from trl_online_runs import build as build_online
from trl_online_runs import writer
from trl_runs import assert_same, build, run_two_ranks, tiny_model, train

import fastdpo
from fastdpo.integrations import deferred_metrics
from fastdpo.integrations.deferred_metrics import Ledger, Number, deferring, settle


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


def test_numbers_are_those_of_plain_code():
    accelerator = Accelerator(cpu=True)
    values = torch.randn(3, 5), torch.randn(3, 5), torch.randint(1, 9, (7,))
    expected = metrics_of(accelerator, *values)
    ledger, gather = Ledger(), accelerator.gather
    with deferring(accelerator, ledger):
        found = metrics_of(accelerator, *values)
    assert accelerator.gather == gather
    assert all(isinstance(x, Number) for x in found.values())
    lists = {name: [x, 1.5] for name, x in found.items()}
    settle(ledger, lists)
    for name, value in expected.items():
        assert lists[name] == [pytest.approx(value, rel=1e-6), 1.5], name


def test_a_quotient_by_nothing_is_zero():
    accelerator, ledger, nothing = Accelerator(cpu=True), Ledger(), torch.zeros(2)
    with deferring(accelerator, ledger):
        found = metrics_of(accelerator, torch.ones(2), torch.ones(2), nothing)
    assert float(found["ratio"]) == float(found["of numbers"]) == 0.0


def test_a_number_can_be_asked_for_early():
    ledger = Ledger()
    first, second = (ledger.gather(torch.tensor([x, x + 2.0])).mean() for x in (1.0, 5.0))
    assert float(first) == 2.0
    assert float(second) == 6.0
    assert int(first + second) == 8
    assert f"{first / 3:.2f}" == "0.67"


def test_a_long_sum_is_not_deep(monkeypatch):
    monkeypatch.setattr(deferred_metrics, "LIMIT", 64)
    ledger, total = Ledger(), 0
    for i in range(3000):
        total += ledger.gather(torch.tensor(i)).sum().item()
        assert len(ledger._pending) <= 64
    assert int(total) == sum(range(3000))


def test_an_accelerator_of_the_users_own_is_given_back():
    accelerator = Accelerator(cpu=True)
    accelerator.gather = mine = lambda x: x
    with deferring(accelerator, Ledger()):
        assert accelerator.gather is not mine
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
    """What the metrics are made of after each step."""

    def __init__(self, metrics):
        self.metrics, self.kinds = metrics, []

    def on_step_end(self, args, state, control, **kwargs):
        values = [x for values in self.metrics().values() for x in values]
        self.kinds.append({type(x) for x in values})


def test_nothing_is_read_before_a_log(tmp_path):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 16, logging_steps=3)
        peek = Peek(lambda: trainer._metrics["train"])
        trainer.add_callback(peek)
        trainer.train()
    assert peek.kinds == [{Number}] * 3
    (log, _) = trainer.state.log_history
    assert all(type(x) in (float, int) for x in log.values())
    assert type(trainer._total_train_tokens) is int


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


def test_online_dpo_reads_nothing_before_a_log(tmp_path):
    with fastdpo.patched("trl.OnlineDPOTrainer"):
        trainer = build_online(tmp_path, writer(0), writer(1), logging_steps=3)
        peek = Peek(lambda: trainer.stats)
        trainer.add_callback(peek)
        trainer.train()
    assert Number in peek.kinds[0]
    assert all(isinstance(x, (float, int)) for x in trainer.state.log_history[0].values())


CUT = {"eval_entropy", "eval_logits/chosen", "eval_logits/rejected", "eval_mean_token_accuracy"}
"""What stock leaves the second rank out of, where one row is left for the last batch of two ranks."""


def test_two_ranks(tmp_path):
    """The logs of stock, at one collective a log in place of fifteen a step."""
    stock, uncut, patched = (run_two_ranks(kind, tmp_path) for kind in ("stock", "uncut", "patched"))
    assert patched[0]["logs"] == patched[1]["logs"]
    different = set()
    for a, b, c in zip(stock[0]["logs"], uncut[0]["logs"], patched[0]["logs"], strict=True):
        assert a.keys() == b.keys() == c.keys()
        of_trl = [{name: x for name, x in log.items() if name != "eval_loss"} for log in (b, c)]
        assert of_trl[1] == pytest.approx(of_trl[0], rel=1e-5, abs=2e-6)
        different |= {name for name in a if c[name] != pytest.approx(a[name], rel=1e-5, abs=2e-6)}
    assert different == CUT

    # Six steps with the logs between them, two, for which Trainer itself has two collectives; an evaluation of two
    # steps, for which it has one each.
    assert [sum(run[0]["counts"][:6]) for run in (stock, patched)] == [6 * 15 + 2 * 2, 2 * (2 + 1)]
    assert [run[0]["counts"][-1] for run in (stock, patched)] == [2 * (14 + 1), 2 * 1 + 1]
