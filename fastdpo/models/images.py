"""Batches with images: a packed batch holds each pair's images once.

The backbone is called as ever, on packed tokens. It runs its image tower, writes the features over
the placeholders and runs its language model. Placeholders are stored in the order of pairs, so that
the features of the first half of the images fall into place if both rows of a pair have the same
images. Nothing of the model is taken apart.

In some models, the tokens of an image see each other in both directions. Such an image is an island of the
layout: a row whose prefix ends where the row itself ends (see `ops.packed_attention`). Which tokens those are is
read from the mask that the model makes for the padded batch. The mask is rebuilt from what was read, and must be
equal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops.devices import is_host
from ..packing import Layout, NotPackable
from ..reasons import Reason
from . import attention
from .batch import PaddedBatch
from .examine import probe
from .examine.probe import ProbeResult
from .mixers import finding
from .parts import attention_window, backbone, language_model, rope_limit, text_config
from .scoring import SCORING_ARGUMENTS
from .state import FusedForward, RunnableBatch, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
OF_IMAGES = (
    *("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw", "image_position_ids"),
    "spatial_shapes",
)
ARGUMENTS = (*OF_TOKENS, *OF_IMAGES)
"""Arguments of a model call that hold images, or types of tokens [R, L]."""

NOT_OF_BACKBONE = {*SCORING_ARGUMENTS, "output_router_logits", "return_dict", "logits_to_keep"}
"""Arguments of a model call that are not passed on to its backbone."""

PLACEHOLDERS = ("image_token_id", "image_token_index")
"""Entries of a configuration that hold the id of the tokens that image features are written over."""

SLIDING = "sliding_attention"

_repeated: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Whether the halves of a tensor are equal, next to the version of the tensor that was compared."""


class Images(NamedTuple):
    """The arguments of a model call that come with images.

    Attributes:
        of_tokens: [R, L] each.
        of_images: of any shape, those of the first half of the rows first.
    """

    of_tokens: dict[str, Tensor]
    of_images: dict[str, Tensor]

    def are_repeated(self) -> bool:
        """Whether the second half of the rows has the images of the first half, in the same order."""
        return all(_is_repeated(x) for x in self.of_images.values())


def images_of(kwargs: dict) -> Images | None:
    """The arguments of a model call that come with images, or None if there are none."""
    groups = (
        {name: kwargs[name] for name in names if kwargs.get(name) is not None} for names in (OF_TOKENS, OF_IMAGES)
    )
    images = Images(*groups)
    return images if any(images) else None


def unsupported_reason(model: PreTrainedModel, kwargs: dict) -> Reason | None:
    """Returns why the arguments of a call cannot be packed for this model, or None if they can."""
    images = images_of(kwargs)
    if images is None:
        return None
    if language_model(model) is model:
        return Reason("text-model", names=", ".join([*images.of_tokens, *images.of_images]))
    others = [name for name in ARGUMENTS if kwargs.get(name) is not None and not isinstance(kwargs[name], Tensor)]
    others = others or [name for name, x in images.of_tokens.items() if x.shape != kwargs["input_ids"].shape]
    if others:
        return Reason("image-arguments", names=", ".join(others))
    return None


def padded_inputs(kwargs: dict) -> dict[str, Any]:
    """The arguments of a model's backbone for a padded batch, with images or without, from those of a call."""
    given = {name: x for name, x in kwargs.items() if x is not None and name not in NOT_OF_BACKBONE}
    return given | {"use_cache": False}


def pack(model: PreTrainedModel, batch: PaddedBatch, images: Images, layout_of: Callable[..., Layout]) -> RunnableBatch:
    """Packs a batch. Each pair's images are run once if both rows have the same.

    Args:
        model: a model that is switched to packed attention.
        batch: of the call.
        images: in the batch.
        layout_of: makes the layout of the batch, in which these `groups` of rows may share a prefix.

    Raises:
        NotPackable: the batch has no packed form.
    """
    if images.of_images and placeholder(model) is None:
        raise NotPackable(Reason("image-placeholder"))
    for shared in (True, False) if images.are_repeated() else (False,):
        layout = layout_of(groups="pairs" if shared else None)
        if not images.of_images or _stores_placeholders_once(model, layout, batch, shared):
            break
    else:
        raise NotPackable(Reason("image-labels"))
    inputs = attention.inputs_of(layout, batch.input_ids)
    inputs |= {name: layout.pack(x) for name, x in images.of_tokens.items()}
    inputs |= {name: x[: len(x) // 2] if shared else x for name, x in images.of_images.items()}
    inputs["position_ids"] = positions_of(model, layout, batch, images)
    inputs["attention_mask"] = attention_masks(model, layout, images.of_tokens, batch.attention_mask)
    return RunnableBatch(layout, inputs, shares_images=shared)


def examined_reason(
    model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, padded: dict[str, Any]
) -> Reason | None:
    """Why a packed batch must be run padded, or None. The first one of each kind is examined.

    Args:
        model: a model that is switched to packed attention.
        fused: the state of its fused forward.
        batch: packed by `pack`.
        padded: the `padded_inputs` of the call.
    """
    kind = cast(Verdict, fused.verdict).key, frozenset(batch.inputs), batch.shares_images
    result = fused.image_results.get(kind)
    if result is None:
        result = fused.image_results[kind] = _examine(model, batch, padded)
    dropout = Reason("attention-dropout") if model.training and result.attention_dropout else None
    return result.unsupported_reason or dropout


def _examine(model: PreTrainedModel, batch: RunnableBatch, padded: dict[str, Any]) -> ProbeResult:
    """Compares the packed hidden states of a batch with its padded ones, unless something rules packing out before."""
    has_images = not padded.keys().isdisjoint(OF_IMAGES)
    if has_images and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return ProbeResult(Reason("image-norm"))
    if has_images and rope_limit(model) is not None:
        return ProbeResult(Reason("image-rope"))
    return probe.compare(model, batch.layout, padded, batch.inputs)


def _is_repeated(x: Tensor) -> bool:
    """Whether the halves of a tensor are equal. On a device, one synchronization, unless it was compared before."""
    if x.dim() == 0 or len(x) % 2:
        return False
    if is_host(x.device) or x.is_inference():  # which has no version
        return torch.equal(*x.chunk(2))
    cached = _repeated.get(x)
    if cached is None or cached[0] != x._version:
        cached = _repeated[x] = x._version, torch.equal(*x.chunk(2))
    return cached[1]


def placeholder(model: PreTrainedModel) -> int | None:
    """The id of the tokens that image features are written over, if the configuration has it."""
    found = (getattr(model.config, name, None) for name in PLACEHOLDERS)
    return next((x for x in found if isinstance(x, int)), None)


def _stores_placeholders_once(model: PreTrainedModel, layout: Layout, batch: PaddedBatch, share: bool) -> bool:
    """Whether the placeholders that are stored for each pair, or for each row, are those of each of
    its rows.
    """
    ids = batch.input_ids
    placeholders = (ids == placeholder(model)) & (batch.attention_mask != 0)  # [R, L]
    owners = len(ids) // (1 + share)
    owner = layout.token_index // ids.shape[1] % owners  # [T]
    stored = owner[layout.pack(placeholders)[0]].bincount(minlength=owners)
    return bool((stored == placeholders.sum(1).view(-1, owners)).all())


def positions_of(model: PreTrainedModel, layout: Layout, batch: PaddedBatch, images: Images) -> Tensor:
    """[1, T]; or [3, 1, T] by the function of a model that counts time, rows and columns."""
    compute = getattr(backbone(model), "compute_3d_position_ids", None)
    if compute is None:
        return layout.position_ids[None]
    given = {**batch._asdict(), **images.of_tokens, **images.of_images}
    try:
        found = compute(**{name: given.get(name) for name in inspect.signature(compute).parameters})
    except Exception as error:  # models may want other arguments here
        raise NotPackable(Reason("image-positions", error=f"{type(error).__name__}: {error}")) from error
    return layout.position_ids[None] if found is None else found.flatten(-2)[..., layout.token_index].unsqueeze(-2)


def attention_masks(
    model: PreTrainedModel, layout: Layout, of_tokens: dict[str, Tensor], attention_mask: Tensor
) -> Tensor | dict[str, Tensor]:
    """The attention mask with which a switched model runs on packed tokens.

    Args:
        model: a model that is switched to packed attention.
        layout: of the batch.
        of_tokens: types of tokens, [R, L] each.
        attention_mask: [R, L], 0 at padding.

    Returns:
        `Layout.mask`, or one with islands, or one for each type of layer.

    Raises:
        NotPackable: the model's mask cannot be made, or no layout gives it.
    """
    make = getattr(type(model), "create_masks_for_generate", None)
    if make is None or not any(x.any() for x in of_tokens.values()):
        return layout.mask
    real = attention_mask != 0
    embeddings = torch.empty(*real.shape, 0, device=real.device)
    try:
        made = make(model.config, embeddings, real, None, None, **of_tokens)
    except Exception as error:  # models may want other arguments here
        raise NotPackable(Reason("image-mask", error=f"{type(error).__name__}: {error}")) from error
    if not isinstance(made, dict):
        return _with_islands(model, layout, _ahead(made, real, None))
    window = attention_window(text_config(model))
    return {
        kind: _with_islands(model, layout, _ahead(mask, real, window if kind == SLIDING else None))
        for kind, mask in made.items()
    }


def _ahead(mask: Any, real: Tensor, window: int | None) -> Tensor | None:
    """[R, L], how many tokens after itself each token sees; None if none sees any."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:  # causal, or made for an attention that is
        return None
    at = torch.arange(real.shape[1], device=real.device)
    visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0  # [R, L, L]
    last = torch.where(visible & real[:, None], at, -1).amax(-1).maximum(at)  # [R, L]
    rebuilt = (at <= last[..., None]) & real[:, None]
    if window is not None:
        rebuilt &= at > at[:, None] - window
    if ((visible != rebuilt) & real[..., None]).any():
        raise NotPackable(Reason("image-attention"))
    ahead = (last - at) * real
    return ahead if ahead.any() else None


def _with_islands(model: PreTrainedModel, layout: Layout, ahead: Tensor | None) -> Tensor:
    """int32 [1, 1, S, 4]: the rows of a layout, and each island as a row of its own."""
    if ahead is None:
        return layout.mask
    if finding.mixers_of(model):
        raise NotPackable(Reason("image-recurrence"))
    seen = layout.pack(ahead)[0].tolist()
    pieces = []
    for prefix, prefix_length, own, own_length in layout.rows.tolist():
        start, end = own, own + own_length
        if not any(seen[start:end]):
            pieces.append((prefix, prefix_length, own, own_length))
            continue
        if prefix_length:
            raise NotPackable(Reason("unshared-image"))
        while start < end:
            stop = start + seen[start] + 1 if seen[start] else next((i for i in range(start, end) if seen[i]), end)
            expected = range(seen[start], -1, -1) if seen[start] else [0] * (stop - start)
            if seen[start:stop] != list(expected):
                raise NotPackable(Reason("cut-image"))
            pieces.append((own, (stop if seen[start] else start) - own, start, stop - start))
            start = stop
    return torch.tensor(pieces, dtype=torch.int32, device="cpu")[None, None]
