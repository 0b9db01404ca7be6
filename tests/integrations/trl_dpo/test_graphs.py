"""`patch(graphs=True)`: the same training by replays of recordings, here on the CPU (see `recorder`)."""

import pytest
import torch

from tests.support.comparison import assert_same_in_low_precision
from tests.support.kernels import recorder as recording
from tests.support.trl.dpo import adapter, assert_same


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    return recording.install(monkeypatch)


OPTIONS = {
    "full": {},
    "LoRA": adapter(),
    "checkpointing": dict(gradient_checkpointing=True),
    "autocast": dict(bf16=True),
    "accumulation": dict(gradient_accumulation_steps=2),
    "a reference that follows": dict(sync_ref_model=True, ref_model_sync_steps=1),
    "precomputed": dict(precompute_ref_log_probs=True),
    "workers": dict(dataloader_num_workers=1),
    "micro-batches": dict(max_tokens=80),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_same_training(both, name):
    stock, patched = both(graphs=True, **OPTIONS[name], max_steps=4)
    if name == "autocast":
        assert_same_in_low_precision(stock, patched, torch.bfloat16, stock.in_float64)
    else:
        assert_same(stock, patched)
    assert patched.calls["policy", "replayed"] >= 2
