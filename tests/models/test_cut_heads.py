"""Which heads that transformers' tensor parallelism has cut score their part of the vocabulary."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from fastdpo.models import head
from fastdpo.ops import definitions

SUPPORTED = ("colwise_gather_output", "colwise_rep")


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def cut(mesh, style, bias=True):
    linear = nn.Linear(8, 13, bias=bias)
    whole = copy.deepcopy(linear)
    for name in ("weight", "bias") if bias else ("weight",):
        ALL_PARALLEL_STYLES[style].shard_param(linear, name, mesh)
    ALL_PARALLEL_STYLES[style].install_forward(linear, mesh)
    return linear, whole


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("style", SUPPORTED)
def test_a_cut_head_scores_targets(style, bias, mesh):
    linear, whole = cut(mesh, style, bias)
    assert head.unsupported_reason(linear) is None
    before = linear.forward
    head.install(linear)
    assert head.unsupported_reason(linear) is None
    hidden, targets = torch.randn(5, 8), torch.tensor([0, 3, 12, 7, -100])
    logps = linear(hidden, fastdpo_targets=targets).logps
    expected = definitions.linear_logps(hidden, whole.weight, targets, bias=whole.bias).logps
    torch.testing.assert_close(logps, expected)
    logps.sum().backward()
    expected.sum().backward()
    assert isinstance(linear.weight.grad, DTensor)
    torch.testing.assert_close(linear.weight.grad.full_tensor(), whole.weight.grad)
    torch.testing.assert_close(linear(hidden), whole(hidden))
    head.restore(linear)
    assert linear.forward is before


@pytest.mark.parametrize("style", ["colwise", "rowwise", "rowwise_rep"])
def test_other_cuts_are_not_supported(style, mesh):
    linear, _ = cut(mesh, style)
    assert head.unsupported_reason(linear).name in ("head-forward", "split-head")


def test_a_forward_inside_is_not_supported(mesh):
    linear = nn.Linear(8, 13)
    linear.forward = lambda x: x
    ALL_PARALLEL_STYLES["colwise_rep"].shard_param(linear, "weight", mesh)
    ALL_PARALLEL_STYLES["colwise_rep"].install_forward(linear, mesh)
    assert head.unsupported_reason(linear).name == "head-forward"


@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_other_placements_are_not_supported(placement, mesh):
    linear, _ = cut(mesh, "colwise_rep", bias=False)
    linear.weight = nn.Parameter(DTensor.from_local(linear.weight.to_local().detach(), mesh, [placement]))
    assert head.unsupported_reason(linear).name == "split-head"


def test_a_weight_that_is_cut_twice_is_not_supported(mesh):
    linear, _ = cut(mesh, "colwise_rep", bias=False)
    local, twice = linear.weight.to_local().detach(), init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "tp"))
    linear.weight = nn.Parameter(DTensor.from_local(local, twice, [Shard(0), Shard(0)]))
    assert head.unsupported_reason(linear).name == "split-head"


def test_a_whole_weight_behind_a_cut_forward_is_not_supported(mesh):
    linear, _ = cut(mesh, "colwise_rep", bias=False)
    linear.weight = nn.Parameter(linear.weight.to_local().detach())
    assert head.unsupported_reason(linear).name == "split-head"


@pytest.mark.parametrize(
    "of_fsdp", [[_StridedShard(0, split_factor=1)], [Replicate(), _StridedShard(0, split_factor=1)]]
)
def test_rows_that_fsdp2_shards_again(of_fsdp, mesh):
    linear, _ = cut(mesh, "colwise_rep", bias=False)
    whole = init_device_mesh("cpu", (1,) * (len(of_fsdp) + 1))
    local = linear.weight.to_local().detach()
    linear.weight = nn.Parameter(DTensor.from_local(local, whole, [*of_fsdp, Shard(0)]))
    assert head.unsupported_reason(linear) is None


@pytest.mark.parametrize(("rows", "sizes"), [(9, [3, 3, 3]), (7, [3, 3, 1]), (4, [2, 2, 0])])
def test_rows_of_each_rank_are_those_of_a_chunked_tensor(rows, sizes):
    assert head.chunk_sizes(rows, 3) == sizes
    chunks = [len(x) for x in torch.zeros(rows, 1).chunk(3)]
    assert chunks == [size for size in sizes if size]
