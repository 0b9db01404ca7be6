"""Models that FSDP2 shards."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharded(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """The model, with its layers and the rest sharded over a mesh, by default all ranks."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model.get_decoder().layers, model):
        fully_shard(unit, mesh=mesh, **options)
    return model
