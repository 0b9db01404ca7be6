"""A head that tensor parallelism has cut is not fused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from fastdpo.models import head


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("style", ["colwise_gather_output", "colwise_rep", "colwise", "rowwise", "rowwise_rep"])
def test_a_cut_head_falls_back(style, bias, mesh):
    linear = nn.Linear(8, 13, bias=bias)
    for name in ("weight", "bias") if bias else ("weight",):
        ALL_PARALLEL_STYLES[style].shard_param(linear, name, mesh)
    ALL_PARALLEL_STYLES[style].install_forward(linear, mesh)
    assert head.unsupported_reason(linear).name == "split-head"


@pytest.mark.parametrize(
    ("placements", "is_gathered"),
    [
        ([Shard(0)], True),
        ([Replicate(), Shard(0)], True),  # of FSDP2 on several machines (HSDP)
        ([Shard(0), Shard(0)], False),
        ([_StridedShard(0, split_factor=1), Shard(0)], False),  # rows of tensor parallelism that FSDP2 shards again
    ],
)
def test_fsdp2_gathers_a_weight_that_it_alone_has_cut(placements, is_gathered, mesh):
    linear = fully_shard(nn.Linear(8, 13), mesh=mesh)
    ranks = init_device_mesh("cpu", (1,) * len(placements))
    linear.weight = nn.Parameter(DTensor.from_local(torch.zeros(13, 8), ranks, placements))
    assert (head.unsupported_reason(linear) is None) == is_gathered
