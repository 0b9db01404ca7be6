"""The trainer of docs/trainers.md, which fastdpo does not know, with the line that the page shows."""

import importlib
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import fastdpo
from tests.contract.harness import Harness, sabotaged_by
from tests.support import faults
from tests.support.comparison import assert_same_training, double
from tests.support.stand_ins import toy_package
from tests.support.stand_ins.toy_package import batches
from tests.support.trl.dpo import tiny_model

NAME = "toy.PairTrainer"


@contextmanager
def setting(directory):
    with toy_package.installed(directory):
        importlib.import_module("toy_line")
        yield


def build(directory, model, reference, steps=3, own=False, **options):
    trainer_class = importlib.import_module("toy.trainer").PairTrainer
    if own:
        trainer_class = type("Own", (trainer_class,), {"log_probs": mean_logits})
    return trainer_class(model, reference, batches()[:steps], **options)


def mean_logits(self, model, batch):
    return model(batch["input_ids"]).logits.mean((1, 2))


def train(directory, *models, **options):
    before, trainer = Counter(fastdpo.calls), build(directory, *models, **options)
    trainer.train()
    calls = Counter({key[1:]: n for key, n in (fastdpo.calls - before).items()})
    return SimpleNamespace(logs=trainer.logs, gradients=trainer.gradients, calls=calls)


def both(directory, prepare=lambda model: model, **options):
    def once(cast=lambda model: model):
        return train(directory, *(cast(prepare(tiny_model(seed=seed))) for seed in range(2)), **options)

    stock = once()
    stock.in_float64 = lambda: once(double)
    with fastdpo.patched(NAME):
        return stock, once()


def assert_same(stock, patched):
    assert len(stock.gradients) == len(patched.gradients) > 0
    assert_same_training(stock, patched, stock.in_float64)


HARNESSES = [
    Harness(
        name=NAME,
        calls=dict(policy=1, reference=1),
        setting=setting,
        train=train,
        build=build,
        both=both,
        models=lambda: [tiny_model(seed=seed) for seed in range(2)],
        one_step=dict(steps=1),
        assert_same=assert_same,
        assert_same_bits=assert_same,
        options={
            "as it is": ({}, dict(policy=3, reference=3)),
            "beta": (dict(beta=2.0), dict(policy=3, reference=3)),
        },
        bypassing={"own scores": (dict(own=True), "Own.log_probs does not call PairTrainer.log_probs")},
        sabotages=sabotaged_by(faults.labels_a_token_late, faults.without_a_result),
        verified={"as it is": ({}, 2)},
    )
]
