"""RewardTrainer of TRL < 0.29, stock against patched."""

import functools

import pytest

from tests.support.models.families import FUSED, kind
from tests.support.trl.dpo import assert_fused, assert_same
from tests.support.trl.reward import OPTIONS, assert_verified_rewards, train_both_rewards


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


def test_verifying(tmp_path, monkeypatch, caplog):
    assert_verified_rewards(tmp_path, monkeypatch, caplog)
