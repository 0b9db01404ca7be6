"""Multimodal models in LLaMA-Factory's DPO stage, on pairs of text."""

import pytest
from llamafactory_runs import FUSED, LORA, STOCK_CALLS, assert_same, assert_stock


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_text_is_packed(both, adapter):
    stock, patched = both(kind="gemma3", **adapter)
    assert_same(stock, patched)
    assert patched.calls == FUSED["dpo"]


def test_positions_in_the_batches_fall_back(both, caplog):
    stock, patched = both(kind="qwen3_vl")
    assert_stock(stock, patched)
    assert patched.calls == STOCK_CALLS["dpo"]
    assert caplog.text.count("batches also hold position_ids") == caplog.text.count("not fused") == 2
