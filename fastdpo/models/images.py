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
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops.devices import is_host
from ..packing import Layout, NotPackable
from ..reasons import Reason
from . import attention
from .batch import Call, PaddedBatch
from .examine import probe
from .examine.probe import ProbeResult
from .mixers import finding
from .parts import attention_window, backbone, language_model, rope_limit, text_config
from .state import FusedForward, RunnableBatch, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLACEHOLDERS = ("image_token_id", "image_token_index")
"""Entries of a configuration that hold the id of the tokens that image features are written over."""

SLIDING = "sliding_attention"

_repeated: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Whether the halves of a tensor are equal, next to the version of the tensor that was compared."""


def unsupported_reason(model: PreTrainedModel, call: Call) -> Reason | None:
    """Returns why the arguments of a call with images cannot be packed for this model, or None if they can."""
    given = {**call.of_tokens, **call.of_images}
    if language_model(model) is model:
        return Reason("text-model", names=", ".join(given))
    others = [name for name, x in given.items() if not isinstance(x, Tensor)]
    others = others or [name for name, x in call.of_tokens.items() if x.shape != call.batch.input_ids.shape]
    return Reason("image-arguments", names=", ".join(others)) if others else None


def are_repeated(call: Call) -> bool:
    """Whether the second half of the rows has the images of the first half, in the same order."""
    return all(map(_is_repeated, call.of_images.values()))


def pack(model: PreTrainedModel, call: Call, layout_of: Callable[..., Layout]) -> RunnableBatch:
    """Packs a batch. Each pair's images are run once if both rows have the same.

    Args:
        model: a model that is switched to packed attention.
        call: its rows and images.
        layout_of: makes the layout of the batch, in which these `groups` of rows may share a prefix.

    Raises:
        NotPackable: the batch has no packed form.
    """
    batch = call.batch
    if call.of_images and placeholder(model) is None:
        raise NotPackable(Reason("image-placeholder"))
    for shared in (True, False) if are_repeated(call) else (False,):
        layout = layout_of(groups="pairs" if shared else None)
        if not call.of_images or _stores_placeholders_once(model, layout, batch, shared):
            break
    else:
        raise NotPackable(Reason("image-labels"))
    own = dict(
        position_ids=positions_of(model, layout, call),
        attention_mask=attention_masks(model, layout, call.of_tokens, batch.attention_mask),
    )
    inputs = attention.inputs_of(layout, batch.input_ids) | own
    inputs |= {name: layout.pack(x) for name, x in call.of_tokens.items()}
    inputs |= {name: x[: len(x) // 2] if shared else x for name, x in call.of_images.items()}
    return RunnableBatch(layout, inputs, shares_images=shared)


def examined_reason(model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, call: Call) -> Reason | None:
    """Why a packed batch must be run padded, or None. The first one of each kind is examined.

    Args:
        model: a model that is switched to packed attention.
        fused: the state of its fused forward.
        batch: packed by `pack`.
        call: of the batch.
    """
    kind = cast(Verdict, fused.verdict).key, frozenset(batch.inputs), batch.shares_images
    result = fused.image_results.get(kind)
    if result is None:
        result = fused.image_results[kind] = _examine(model, batch, call)
    dropout = Reason("attention-dropout") if model.training and result.attention_dropout else None
    return result.unsupported_reason or dropout


def _examine(model: PreTrainedModel, batch: RunnableBatch, call: Call) -> ProbeResult:
    """Compares the packed hidden states of a batch with its padded ones, unless something rules packing out before."""
    if call.of_images and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return ProbeResult(Reason("image-norm"))
    if call.of_images and rope_limit(model) is not None:
        return ProbeResult(Reason("image-rope"))
    return probe.compare(model, batch.layout, call.padded_inputs, batch.inputs)


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
    stored = owner[placeholders.flatten()[layout.token_index]].bincount(minlength=owners)
    return bool((stored == placeholders.sum(1).view(-1, owners)).all())


def positions_of(model: PreTrainedModel, layout: Layout, call: Call) -> Tensor:
    """[1, T]; or [3, 1, T] by the function of a model that counts time, rows and columns."""
    compute = getattr(backbone(model), "compute_3d_position_ids", None)
    if compute is None:
        return layout.position_ids[None]
    given = {**call.batch._asdict(), **call.of_tokens, **call.of_images}
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
    seen = ahead.flatten()[layout.token_index].tolist()
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
