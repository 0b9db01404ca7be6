"""OpenRLHF's DPOTrainer on hybrid models, whose layers are recurrent or convolutional in part."""

import pytest
from openrlhf_runs import Strategy, assert_same, checkpoint, train

import fastdpo
from fastdpo.models.mixers.segments import Segments
from tests.support.comparison import double
from tests.support.recorded_calls import recorded_calls

KINDS = {
    "qwen3_5_text": dict(
        **dict(layer_types=["linear_attention", "full_attention"], head_dim=8),
        **dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
    ),
    "falcon_h1": dict(
        **dict(head_dim=8, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_d_ssm=64),
        **dict(mamba_chunk_size=4, mamba_n_groups=1),
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"], block_multiple_of=8),
}
"""Maps a model type to its configuration. Chunks are short where they can be, so that states are shared."""


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packing_samples"])
@pytest.mark.parametrize("kind", KINDS)
def test_hybrid(tmp_path, monkeypatch, kind, packing):
    found = recorded_calls(monkeypatch, Segments, "sequences")
    paths = [checkpoint(tmp_path, kind, seed, **KINDS[kind]) for seed in range(2)]
    # With packing_samples, OpenRLHF's recurrences and convolutions go on from one row to the next.
    stock = train(*paths, Strategy())
    stock.in_float64 = lambda: train(*paths, Strategy(), cast=double)
    with fastdpo.patched("openrlhf"):
        patched = train(*paths, Strategy(packing))
    assert_same(stock, patched)
    assert patched.calls == {("policy", "fused"): 3, ("reference", "fused"): 3}
    assert kind != "falcon_h1" or any(sequences.parents is not None for sequences in found)
