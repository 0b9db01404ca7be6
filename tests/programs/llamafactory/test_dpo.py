"""LLaMA-Factory's DPO stage in bfloat16."""

import pytest
import torch
from llamafactory_runs import FUSED

from tests.support.comparison import assert_same_in_low_precision

FUSED = FUSED["dpo"]


def test_bf16(both):
    stock, patched = both(bf16=True, use_cpu=True)
    assert_same_in_low_precision(stock, patched, torch.bfloat16, pytest.fail)
    assert patched.calls == FUSED
