"""accelerate's context parallelism (`ParallelismConfig(cp_size=...)` under FSDP2), for trainers whose batches fastdpo
splits itself.

accelerate gives the ranks of a group the same batch, and FSDP2 averages over them. What it and transformers do to
split rows is left out, and what is gathered from all ranks holds each row once.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

from torch import Tensor

from ...models.ranks.sequence_group import SequenceGroup
from ..replacements import temporarily

RELIES_ON = (
    "accelerate.accelerator:Accelerator._prepare_cp",
    "transformers.trainer:Trainer._prepare_context_parallel_inputs",
)
"""The functions that it replaces (see `TrainerLine.options_rely_on`)."""


def sequence_group() -> SequenceGroup | None:
    """The ranks that share a batch, if accelerate was configured for it."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState._shared_state
    parallelism, mesh = state.get("parallelism_config"), state.get("device_mesh")
    if parallelism is None or mesh is None or not parallelism.cp_enabled:
        return None
    return SequenceGroup.of(mesh["cp"].get_group())


def install(trainer: Any, undo: ExitStack) -> None:
    """Replaces functions of a trainer and of its accelerator until the stack is closed."""
    from accelerate.utils import recursively_apply

    accelerator = trainer.accelerator
    if "_prepare_cp" in vars(accelerator):
        return
    gather, mesh = accelerator.gather, accelerator.torch_device_mesh
    first = mesh.mesh.select(mesh.mesh_dim_names.index("cp"), 0).flatten().tolist()  # of each group

    def once(x: Tensor) -> Tensor:
        return x.unflatten(0, (mesh.mesh.numel(), -1))[first].flatten(0, 1)

    of_accelerator = dict(
        _prepare_cp=lambda *args: args,  # otherwise, hooks that drop the attention mask
        gather=lambda tensors: recursively_apply(once, gather(tensors)),
    )
    undo.enter_context(temporarily(accelerator, **of_accelerator))
    undo.enter_context(
        temporarily(trainer, _prepare_context_parallel_inputs=lambda model, inputs: (nullcontext, inputs))
    )
