"""A side of a trainer is what its name says, or it fails."""

import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations import liger
from trl.trainer import utils as trl_utils

import fastdpo
from benchmarks.sides import trainer
from benchmarks.sides.budget import BudgetStep
from benchmarks.sides.trainer import TrainerStep, build_trainer
from benchmarks.sides.workload import Workload
from benchmarks.suites import step
from fastdpo.models import calls
from fastdpo.models.running import pace
from tests.support.kernels import recorder

WORK = Workload((((8, 4, 3), (5, 2, 6)),), size=step.QUICK_SIZE)


def stand_in(replaced: list[str]):
    """Of the package liger_kernel: gives the named modules a forward of its own."""

    def apply(model, **config):
        assert config == {"fused_linear_cross_entropy": False}  # as TRL asks for
        for name in replaced:
            module = model.get_submodule(name)

            def forward(*args, own=module.forward):
                return own(*args)

            forward.__module__ = "liger_kernel.transformers.swiglu"
            module.forward = forward

    return SimpleNamespace(_apply_liger_kernel_to_instance=apply)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("replaced", [["model.layers.1.mlp"], []])
def test_liger_replaces_layers(replaced, lora, monkeypatch, tmp_path):
    """By the function that `train()` calls, which does nothing to models that it does not know."""
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in(replaced))
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: True)
    work = Workload(WORK.batches, lora=lora, size=WORK.size)

    def build():
        return build_trainer(work, tmp_path, "sdpa", use_liger_kernel=True)

    if replaced:
        modules = build().model.modules()
        assert sum(module.forward.__module__.startswith("liger_kernel") for module in modules) == 1
    else:
        with pytest.raises(RuntimeError, match=r"Liger must replace layers of .*; it has replaced none"):
            build()


@pytest.fixture
def checked(monkeypatch):
    """Builds a side in this process, as if in one of its own, and checks it."""
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    monkeypatch.setattr(trl_utils, "_use_triton", trl_utils._use_triton)

    def build(side, *args, **options):
        fastdpo.unpatch()
        for counter in (calls.calls, calls.tokens, calls.outcomes):
            counter.clear()
        monkeypatch.setitem(torch._dynamo.utils.counters, "stats", Counter())
        made = side(WORK, *args, **options)
        made.check()
        return made

    yield build
    fastdpo.unpatch()


PROVEN = [  # the mode and options of a side, what is not as it says, and the error
    ("labelled", {}, dict(labelled=Counter()), "labelled positions only"),
    ("stock", {}, dict(compiles=True), "nothing was compiled"),
    ("stock", {}, dict(four_bit_weights=14), "14 weights of the side must be quantized; 0 are"),
    ("fastdpo", dict(share_prompts=True), dict(shares=False), "must share no prompts; of .* tokens it computed"),
    ("fastdpo", dict(share_prompts=False), dict(shares=True), "must share prompts; of .* tokens it computed"),
]


@pytest.mark.parametrize(("mode", "options", "other", "message"), PROVEN)
def test_a_side_proves_what_it_says(mode, options, other, message, checked):
    side = checked(TrainerStep, mode, **options)
    side.prove()
    vars(side).update(other)
    with pytest.raises(RuntimeError, match=message):
        side.prove()


class OnTheHost(TrainerStep):
    """Proves no launch of a kernel."""

    LAUNCHES = False


def test_a_side_with_graphs_replays_them(checked, monkeypatch):
    """In the place of a GPU."""
    recorder.install(monkeypatch)
    side = checked(OnTheHost, "fastdpo", graphs=True)
    side.step(0)
    side.prove()
    calls.calls["trl.DPOTrainer", "policy", "fused"] += 1
    with pytest.raises(RuntimeError, match="must replay graphs; of 3 calls since the check it replayed 2"):
        side.prove()


def test_a_side_that_decides_trains_until_it_has(checked, monkeypatch):
    """In the place of a GPU, with recordings that always pay."""
    recorder.install(monkeypatch)
    monkeypatch.setattr(trainer, "SETTLING", 12)
    monkeypatch.setattr(pace, "COMPILING_SECONDS", float("inf"))
    side = checked(OnTheHost, "fastdpo", decides=True)
    assert pace.training().done == trainer.SETTLING
    assert pace.training().left == trainer.STEPS_LEFT - trainer.SETTLING - 2  # those in which tokens were counted
    side.step(0)
    side.reset()
    facts = side.facts()
    roles = [re.search(r"\((\w+)\): recorded batches of up to 32 tokens", x)[1] for x in facts["decided"]]
    assert roles == ["policy", "reference"]
    assert not facts["decided_while_timed"]
    assert fastdpo.calls["trl.DPOTrainer", "policy", "replayed"] > trainer.SETTLING // 2
    side.settled.clear()
    with pytest.raises(RuntimeError, match="must decide by itself"):
        side.prove()


def test_a_side_with_a_budget_cuts_steps(checked):
    side = checked(BudgetStep)
    side.prove()
    calls.outcomes[side.TRAINER, "micro-batches"] = calls.outcomes[side.TRAINER, "steps"]
    with pytest.raises(RuntimeError, match="must cut steps"):
        side.prove()
