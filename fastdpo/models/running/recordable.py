"""What keeps a model, or a call, from being recorded in a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ...reasons import Reason
from .. import parts
from ..identity.structure import additions_to
from ..mixers import finding
from ..ranks.sharding import is_sharded
from .compiled import trainer_compiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKPOINTING = "_gradient_checkpointing_func"
"""The attribute by which transformers gives a layer the function that checkpoints it."""


def unsupported_reason(model: PreTrainedModel, modules: list[nn.Module], tensors: list[Tensor]) -> Reason | None:
    """Why a model cannot be recorded, as far as is known before."""
    device = tensors[0].device
    if trainer_compiles():
        return Reason("graphs-compiled")
    kinds = {
        "lies on several ranks or devices": is_sharded(model) or any(x.device != device for x in tensors),
        "mixes tokens outside of its attention": bool(finding.mixers_of(model)),
        "has rotary embeddings that depend on the width of a batch": parts.rope_limit(model) is not None,
    }
    name = type(model).__name__
    for kind, holds in kinds.items():
        if holds:
            return Reason("graphs-model", model=name, kind=kind)
    changed = next((x for x in modules if any(additions_to(x)) or _is_checkpointed_otherwise(x)), None)
    if changed is None and have_hooks(tensors):
        changed = model
    return None if changed is None else Reason("graphs-hooks", module=type(changed).__name__)


def have_hooks(tensors: list[Tensor]) -> bool:
    return any(x._backward_hooks or x._post_accumulate_grad_hooks for x in tensors)


def _is_checkpointed_otherwise(module: nn.Module) -> bool:
    function = vars(module).get(CHECKPOINTING, checkpoint)
    return getattr(function, "func", function) is not checkpoint


def offloading_reason() -> Reason | None:
    """That code around the call replaces what autograd saves, as to move activations to the host."""
    try:
        with disable_saved_tensors_hooks("recorded"):
            return None
    except RuntimeError:
        return Reason("graphs-activations")
