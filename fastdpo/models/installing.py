"""What is replaced in a model besides its forward: its attention, its mixers, its head and its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule

from . import attention, head, pickling
from .mixers import finding
from .pickling import ATTRIBUTE
from .ranks import sharding
from .state import FusedForward, states

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def switch_attention(model: PreTrainedModel, fused: FusedForward) -> None:
    """Makes a model take packed batches, once for each verdict: its mixers may call other functions by then."""
    attention.switch(model)
    fused.is_switched = True
    for mixer in finding.mixers_of(model):
        pickling.install(mixer)


def install_head(model: PreTrainedModel, fused: FusedForward) -> None:
    """Makes a model's LM head score, for a model whose structure is known."""
    if fused.options.rewards:
        return
    head.install(head.head_of(model))
    pickling.install(head.head_of(model))
    if fused.structure.modules_of(model, FSDPModule):
        sharding.keep_output_dtypes(model, head.head_of(model))


def restore(model: PreTrainedModel, fused: FusedForward) -> None:
    """Gives a model its own attention, its own head and its own layers back."""
    fused.runner.restore()
    restore_padded(model, fused)


def restore_padded(model: PreTrainedModel, fused: FusedForward) -> None:
    """Gives a model its own attention and its own head back, except for what other models with a fused forward run as
    well. Padded calls run its own layers anyway.
    """
    kept = {module for other, x in states() if other is not model and x.is_switched for module in other.modules()}
    if fused.is_switched:
        attention.restore(model, kept)
        fused.is_switched = False
    lm_head = head.head_of(model)
    if lm_head not in kept:
        head.restore(lm_head)
        sharding.restore_output_dtypes(model, lm_head)
    for module in model.modules():
        if ATTRIBUTE not in vars(module) and module not in kept:
            pickling.uninstall(module)
