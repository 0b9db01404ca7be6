"""RewardTrainer of TRL < 0.29, stock against patched."""

import functools

import pytest

import fastdpo
from tests.support.models.families import FUSED, kind
from tests.support.trl.dpo import assert_fused, assert_same
from tests.support.trl.reward import (
    OPTIONS,
    assert_verified_rewards,
    reward_model,
    train_both_rewards,
    train_reward,
)


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_rewards, tmp_path)


@pytest.mark.parametrize("option", OPTIONS)
def test_option(both, option):
    options, calls = OPTIONS[option]
    stock, patched = both(**options)
    assert_fused(patched, **calls)
    assert_same(stock, patched)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "phi3", "gpt_oss", "mixtral"])
def test_family(both, name):
    stock, patched = both(kind=kind(name), tiny=FUSED[name][1], max_steps=2)
    assert_fused(patched, policy=2)
    assert_same(stock, patched)


def test_a_budget_of_tokens_is_refused(tmp_path):
    refused = pytest.raises(NotImplementedError, match=r"^patch: max_tokens does not support .* before version 5")
    with fastdpo.patched("trl.RewardTrainer", max_tokens=100), refused:
        train_reward(tmp_path, reward_model())


def test_verifying(tmp_path, monkeypatch, caplog):
    assert_verified_rewards(tmp_path, monkeypatch, caplog)
