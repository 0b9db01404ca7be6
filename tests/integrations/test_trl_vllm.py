"""Trainers with completions of a vLLM server, stock against patched."""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer, RLOOTrainer

import fastdpo
from fastdpo.models.state import state_of
from tests.support.stand_ins import vllm
from tests.support.trl.dpo import LORA, assert_fused
from tests.support.trl.groups import NAMES, assert_same_groups, build_group, train_both_groups
from tests.support.trl.online import assert_all_same, train_three, writer

SERVER = dict(use_vllm=True, vllm_mode="server")
SCORED_ONCE = dict(policy=3, old_policy=3, reference=3)
ADAPTER = dict(reference=False, peft_config=LoraConfig(**LORA))


@pytest.fixture
def clients(monkeypatch):
    return vllm.serve(monkeypatch, writer)


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_groups, tmp_path, beta=0.1, **SERVER)


def assert_same_weights_sent(clients, steps=3):
    stock, patched = (client.updates for client in clients[:2])
    assert len(stock) == len(patched) == steps
    for sent, other in zip(stock, patched, strict=True):
        assert list(sent) == list(other)
        for x, y in zip(sent.values(), other.values(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(x, y) for x, y in zip(stock[0].values(), stock[-1].values(), strict=True))


IMPORTANCE = dict(vllm_importance_sampling_clip_max=1.1)
CASES = {
    "GRPO": (GRPOTrainer, {}),
    "GRPO, truncated tokens": (GRPOTrainer, dict(vllm_importance_sampling_mode="token_truncate", **IMPORTANCE)),
    "GRPO, truncated sequences": (GRPOTrainer, dict(vllm_importance_sampling_mode="sequence_truncate", **IMPORTANCE)),
    "GRPO, temperature": (GRPOTrainer, dict(temperature=0.7)),
    "GRPO, adapter": (GRPOTrainer, ADAPTER),
    "GRPO, no correction": (GRPOTrainer, dict(vllm_importance_sampling_correction=False)),
    "RLOO": (RLOOTrainer, {}),
    "RLOO, adapter": (RLOOTrainer, ADAPTER),
}


@pytest.mark.parametrize("name", CASES)
def test_groups(both, clients, name):
    trainer_class, options = CASES[name]
    stock, patched = both(trainer_class, **options)
    assert_same_groups(stock, patched)
    corrects = "no correction" not in name
    assert_fused(patched, **SCORED_ONCE | ({} if corrects else dict(old_policy=0)))
    assert_same_weights_sent(clients)
    if "GRPO" in name and corrects:
        assert all(log["sampling/importance_sampling_ratio/mean"] != 1 for log in stock.logs if "loss" in log)


@pytest.mark.parametrize("options", [{}, ADAPTER], ids=["full", "adapter"])
def test_online_dpo(tmp_path, clients, options):
    runs = train_three(tmp_path, **SERVER, **options)
    assert_fused(runs[-1], policy=3, reference=3)
    assert_all_same(*runs)
    assert_same_weights_sent([clients[0], clients[2]])


@pytest.mark.parametrize(("mode", "compile"), [("colocate", False), ("server", "auto")])
@pytest.mark.parametrize("trainer_class", NAMES)
def test_an_engine_on_the_same_device_keeps_its_memory(tmp_path, monkeypatch, trainer_class, mode, compile):
    module = sys.modules[trainer_class.__module__]
    monkeypatch.setattr(module, "VLLMGeneration", lambda **options: SimpleNamespace())
    with fastdpo.patched(trainer_class):
        trainer = build_group(tmp_path, writer(), trainer_class, beta=0.0, use_vllm=True, vllm_mode=mode)
        assert state_of(trainer.model).options.compile == compile
