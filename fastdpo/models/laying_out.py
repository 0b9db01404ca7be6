"""Lays out the batch of a call: packed, or padded as it came where ranks run a model together."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from .. import packing
from ..logs import logger
from ..packing import Layout, NotPackable
from ..reasons import Reason
from . import attention, images, support
from .layouts import Groups, layout_of, padded_batch
from .probe import ProbeResult
from .router import returns_router_logits
from .sharding import is_sharded
from .state import FusedForward, RunnableBatch, install_head, switch_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def packed_call(model: PreTrainedModel, fused: FusedForward, kwargs: dict) -> RunnableBatch:
    """The packed batch. One with images is examined before it is run, as the model was before.

    Raises:
        NotPackable: the batch has no packed form, or the model does not run packed as it is now.
    """
    if fused.examined not in fused.probe_results:
        raise NotPackable(Reason("changed-model"))
    if model.training and cast(ProbeResult, fused.probe_result).attention_dropout:
        raise NotPackable(Reason("attention-dropout"))
    switch_attention(model, fused)
    install_head(model, fused)
    found = images.images_of(kwargs)
    if found is None:
        layout = call_layout(model, fused, kwargs)
        return RunnableBatch(layout, attention.packed_inputs(model, layout, kwargs["input_ids"]), {})
    if is_sharded(model):
        raise NotPackable(Reason("image-ranks"))

    make_layout = functools.partial(call_layout, model, fused, kwargs, groups="pairs")
    share_random = fused.options.share_prompts != "deterministic"
    results = fused.examined, fused.image_results
    prepared = images.pack_examined(model, *results, found, kwargs, make_layout, share_random=share_random)
    return RunnableBatch(*prepared, found.of_images)


def padded_call(model: PreTrainedModel, fused: FusedForward, args: tuple, kwargs: dict) -> RunnableBatch | None:
    """How a call runs padded, with the fused head, next to ranks that run their packed batches. None if
    it has no labels, or if the model's own forward is to run it.

    The backbone gets all that the call was given, as from TRL's forward. That forward reads the weight of
    the head, so if others have added hooks to the head or replaced its forward, they do not run here either.
    """
    shifted = kwargs.get("shift_labels") is not None
    labels = kwargs.get("shift_labels" if shifted else "labels")
    if labels is None or (fused.options.rewards and not fused.options.rewards.runs_padded):
        return None
    mask = kwargs.get("attention_mask")
    mask = mask if isinstance(mask, Tensor) and mask.shape == labels.shape else torch.ones_like(labels)
    layout = packing.padded_layout(labels, mask, labels, shifted)
    bare = support.scoring_unsupported_reason(model, **fused.options.of_head) is not None
    if not bare:
        install_head(model, fused)
    return RunnableBatch(layout, images.padded_inputs(kwargs), {}, args, bare)


def call_layout(
    model: PreTrainedModel, fused: FusedForward, kwargs: dict, *, groups: Groups | None = None, share: bool = True
) -> Layout:
    """The layout of a packed call, with shared prompts if its options and the model's state allow it."""
    batch, requested = padded_batch(kwargs), fused.options.share_prompts
    share = share and requested is not False
    if share and requested == "deterministic" and model.training and is_random(model, fused):
        share, reason = False, Reason("dropout")
        if not fused.has_logged_dropout:
            fused.has_logged_dropout = True
            name, role = fused.options.integration, fused.options.role
            logger.info("fastdpo: %s (%s): prompts are not shared, %s", name, role, reason.named)
    # All positions of the padded rows count, padding included.
    width = batch.input_ids.shape[1]
    reach = None if support.rope_reason(model, width) is None else width
    groups = (groups or fused.options.groups) if share else None
    return layout_of(batch, groups=groups, store_all=returns_router_logits(model, kwargs), reach=reach)


def is_random(model: PreTrainedModel, fused: FusedForward) -> bool:
    """Whether training is random. The probe misses dropout in an
    adapter whose weights are still zero.
    """
    seen = fused.probe_result is not None and fused.probe_result.is_random
    return seen or any(cast(nn.Dropout, x).p > 0 for x in fused.structure.modules_of(model, nn.Dropout))
