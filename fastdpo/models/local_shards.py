"""The part of a model that this process holds under FSDP2 and DeepSpeed's ZeRO-3."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local_shard(x: Any) -> Tensor:
    """The elements of a parameter or buffer that this process holds, as a plain tensor.

    Raises:
        NotImplementedError: DeepSpeed has moved them to a disk.
    """
    if isinstance(x, DTensor):
        return x.to_local()
    if not hasattr(x, "ds_id"):
        return x
    if x.ds_tensor.numel() < x.ds_tensor.ds_numel:
        raise NotImplementedError("DeepSpeed has moved parameters to a disk (offload_param)")
    return x.ds_tensor


def reshard(model: nn.Module) -> None:
    """Gives each FSDP2 module of a model its shards back, without communication.

    A forward pass without a backward pass leaves some modules with whole parameters, in the dtype
    of mixed precision. Pass the outermost module, such as the `PeftModel`: it holds the shards of
    all parameters that no module inside it does.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
