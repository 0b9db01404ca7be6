"""The metrics of logits, which are those of completions, and the comparison with stock."""

import pytest
from llamafactory.train.dpo import trainer as dpo_trainer
from llamafactory.train.kto import trainer as kto_trainer
from llamafactory_runs import checkpoint, train

import fastdpo
from fastdpo.packing import IGNORE_INDEX
from tests.support.comparison import approximately


def means(logits, labels):
    """[R] the mean of logits [R, L, V] at the positions whose next token is scored."""
    scored = labels[:, 1:] != IGNORE_INDEX
    return (logits[:, :-1].mean(-1) * scored).sum(1) / scored.sum(1)


@pytest.fixture
def completions_in_stock(monkeypatch):
    """Makes stock log the metrics that patched trainers log."""
    dpo, kto = dpo_trainer.CustomDPOTrainer, kto_trainer.CustomKTOTrainer
    stock_dpo, stock_kto = dpo.concatenated_forward, kto.forward

    def concatenated_forward(self, model, batch, is_ref_model=False):
        scored = (batch["labels"][:, 1:] != IGNORE_INDEX).chunk(2)
        results = stock_dpo(self, model, batch, is_ref_model)
        for name, where in zip(("chosen_logits", "rejected_logits"), scored, strict=True):
            results[name] = results[name][:, :-1][where]
        return results

    def forward(self, model, batch, prefix=""):
        logits, *logps = stock_kto(self, model, batch, prefix)
        return means(logits, batch[f"{prefix}labels"]), *logps

    with monkeypatch.context() as patch:
        patch.setattr(dpo, "concatenated_forward", concatenated_forward)
        patch.setattr(kto, "forward", forward)
        yield patch


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_logits_are_those_of_completions(tmp_path, stage, completions_in_stock):
    model = checkpoint(tmp_path)
    stock = train(tmp_path, model, stage, evaluate=True)
    completions_in_stock.undo()
    with fastdpo.patched("llamafactory"):
        patched = train(tmp_path, model, stage, evaluate=True)
    renamed = [{name.replace("logits/", "completion_logits/"): x for name, x in log.items()} for log in stock.logits]
    assert sum(map(len, renamed)) >= 6
    assert patched.logits == [approximately(log) for log in renamed]
