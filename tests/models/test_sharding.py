"""A model that is scored whole, and then sharded by FSDP2, on one rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastdpo
from fastdpo.models import forward
from fastdpo.models.state import ForwardOptions
from tests.support.trl.dpo import tiny_model

NAME = "a model that is sharded later"


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_model_is_examined_again_once_it_is_sharded(mesh):
    model, ids = tiny_model().eval(), torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
    forward.install(model, ForwardOptions(NAME, "policy"), lambda rows, _: rows.logps.logps, prior_scores=False)
    whole = model(**inputs)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh)
    sharded = model(**inputs)
    torch.testing.assert_close(sharded, whole)
    paths = {path: n for (name, _, path), n in fastdpo.calls.items() if name == NAME}
    assert paths == {"fused": 2}
