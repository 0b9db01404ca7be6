"""A model whose attention modules and head are separate FSDP2 units, on one rank."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fastdpo
from fastdpo import ref_logps
from tests.support.ref_logps import assert_close, exact, tokens
from tests.support.trl.dpo import tiny_model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_and_head_as_separate_units(mesh, implementation):
    """FSDP2 changes the class of a unit; the new one is not in the file of the eager attention."""
    rows = tokens(8)
    model = tiny_model(attn_implementation=implementation)
    for layer in model.model.layers:
        fully_shard(layer.self_attn, mesh=mesh)
    for unit in (model.lm_head, model):
        fully_shard(unit, mesh=mesh)
    before = fastdpo.calls["fastdpo.ref_logps", "reference", "fused"]
    logps = ref_logps.precompute(model, rows)
    assert fastdpo.calls["fastdpo.ref_logps", "reference", "fused"] > before
    with torch.no_grad():
        assert_close(logps, exact(tiny_model(attn_implementation=implementation), rows))
