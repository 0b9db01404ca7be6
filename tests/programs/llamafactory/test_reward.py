"""LLaMA-Factory's stage of reward models: patched equals stock.

Its value head has dropout, which a fused training draws for the last tokens alone. The tests compare trainings
without it.
"""

import pytest
import torch
from llamafactory_runs import FUSED, train_both

from tests.support.comparison import assert_same_in_low_precision

FUSED = FUSED["rm"]
WITHOUT_DROPOUT = dict(summary_dropout_prob=0.0)


@pytest.fixture
def both(tmp_path):
    """A function that trains stock, then patched, without dropout of the value head."""

    def run(kind="llama", tiny=None, **options):
        return train_both(tmp_path, "rm", kind, WITHOUT_DROPOUT | (tiny or {}), **options)

    return run


def test_bf16(both):
    stock, patched = both(bf16=True, use_cpu=True)
    assert_same_in_low_precision(stock, patched, torch.bfloat16, pytest.fail)
    assert patched.calls == FUSED


def test_dropout_of_the_value_head(tmp_path):
    """With it, which is LLaMA-Factory's default, a training is fused, and is another one."""
    without, dropped = (train_both(tmp_path, "rm", tiny=tiny)[1] for tiny in (WITHOUT_DROPOUT, {}))
    assert without.calls == dropped.calls == FUSED
    assert without.logs[0]["loss"] != dropped.logs[0]["loss"]
