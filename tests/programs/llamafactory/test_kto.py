"""LLaMA-Factory's KTO stage: patched equals stock."""

import pytest
from llamafactory_runs import FUSED, LORA, assert_same

FUSED = FUSED["kto"]
OPTIONS = {
    "as it is": {},
    "weights": dict(kto_chosen_weight=0.5, kto_rejected_weight=2.0),
    "ftx": dict(pref_ftx=0.5),
    "beta": dict(pref_beta=0.05),  # the tolerance of rewards is proportional to beta
    "lora": LORA,
    "an odd batch": dict(per_device_train_batch_size=3),
    "one row": dict(per_device_train_batch_size=1),
    "cut off": dict(cutoff_len=8),
    "accumulation": dict(gradient_accumulation_steps=2, per_device_train_batch_size=2),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(both, option):
    stock, patched = both("kto", **OPTIONS[option])
    assert_same(stock, patched)
    batches = OPTIONS[option].get("gradient_accumulation_steps", 1)
    assert patched.calls == {call: n * batches for call, n in FUSED.items()}


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_evaluation(both, adapter):
    stock, patched = both("kto", evaluate=True, **adapter)
    assert_same(stock, patched)
    assert patched.calls == {**FUSED, ("reference", "fused"): 6, ("eval", "fused"): 3}
    assert any("eval_rewards/margins" in log for log in patched.logs)
    assert any("eval_completion_logits/chosen" in log for log in patched.logits)
