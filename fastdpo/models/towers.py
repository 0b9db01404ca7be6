"""Image towers that policy and reference have in common, so that images are encoded once for both.

A tower is a transformers model inside of a multimodal model, outside of its language model. What a
frozen tower returns for the images of a batch is kept until the batch's other model asks for it. That
model has the same tower if it is the same module without adapters, or one whose weights are equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from .adapters import adapter_modules
from .facts import has_dropout
from .parts import language_model
from .structure import additions_to, plain_attributes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class _Encoded:
    """A call of a tower.

    Attributes:
        tower: the tower that was called.
        arguments: its arguments.
        autocast: the dtype of autocast, or None.
        output: what it returned, detached.
        versions: of all tensors among these, and of the weights.
    """

    tower: weakref.ref[PreTrainedModel]
    arguments: tuple[tuple, dict[str, Any]]
    autocast: torch.dtype | None
    output: Any
    versions: list[int]


encoded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Calls whose results another model may need, by a tensor of their batch: those of the last batch
only, for as long as it exists.
"""


def sharing(model: PreTrainedModel, images: dict[str, Tensor]) -> AbstractContextManager[None]:
    """A context in which the towers of a model return what they, or equal ones, have returned before.

    Args:
        model: a multimodal model that is about to be called.
        images: the image tensors of the batch, at least one.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return nullcontext()
    return _sharing(model, next(iter(images.values())))


@contextmanager
def _sharing(model: PreTrainedModel, batch: Tensor) -> Iterator[None]:
    earlier = [call for calls in encoded.values() for call in calls]
    encoded.clear()
    kept = encoded[batch] = []
    towers = [tower for tower in towers_of(model) if _is_fixed(tower)]
    for tower in towers:
        tower.forward = reusing(tower, earlier, kept)
    try:
        yield
    finally:
        for tower in towers:
            del tower.forward


def towers_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The outermost transformers models inside of a model that its language model is no part of."""
    from transformers import PreTrainedModel

    text, found = language_model(model), []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, PreTrainedModel) and all(part is not text for part in child.modules()):
                found.append(child)
            elif child is not text:
                visit(child)

    visit(model)
    return found


def _is_fixed(tower: PreTrainedModel) -> bool:
    """Whether its weights and arguments alone decide what a tower returns, and nothing in it is trained."""
    if any(x.is_inference() for x in _weights(tower)):  # without a version
        return False
    if any(p.requires_grad for p in tower.parameters()) and torch.is_grad_enabled():
        return False
    if any(adapter_modules(tower)) or (tower.training and has_dropout(tower)):
        return False
    return not any(any(additions_to(module)) for module in tower.modules())


def reusing(tower: PreTrainedModel, earlier: list[_Encoded], kept: list[_Encoded]) -> Callable:
    """The forward of a tower that takes its results from earlier calls, and keeps those of new ones."""
    own = tower.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = args, {name: x for name, x in kwargs.items() if name != "use_cache"}  # towers have no cache
        autocast = _autocast(tower.device)
        if any(x.requires_grad or x.is_inference() for x in _tensors_of(arguments)):
            return own(*args, **kwargs)
        encoded_by_others = False
        for call in earlier:
            known = call.tower()
            if known is None or _versions(call.output, _weights(known)) != call.versions:
                continue
            if not _are_equal(call.arguments, arguments):
                continue
            encoded_by_others = True
            if call.autocast == autocast and (known is tower or _have_equal_weights(known, tower)):
                earlier.remove(call)
                return call.output
        output = own(*args, **kwargs)
        if not encoded_by_others:  # otherwise this is the second model, and there is no third
            detached = tree_map_only(Tensor, Tensor.detach, output)
            versions, copied = _versions(detached, _weights(tower)), tree_map_only(Tensor, Tensor.clone, arguments)
            kept.append(_Encoded(weakref.ref(tower), copied, autocast, detached, versions))
        return output

    return forward


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _versions(*trees: Any) -> list[int]:
    return [x._version for x in _tensors_of(trees)]


def _tensors_of(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_flatten(tree)[0] if isinstance(x, Tensor))


def _weights(tower: PreTrainedModel) -> list[Tensor]:
    return [*tower.parameters(), *tower.buffers()]


def _are_equal(first: Any, second: Any) -> bool:
    (leaves, form), (others, other_form) = tree_flatten(first), tree_flatten(second)
    return form == other_form and all(map(_is_equal, leaves, others))


def _is_equal(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and bool(x == y)
    return _description(x) == _description(y) and torch.equal(x, y)


def _description(x: Tensor) -> tuple:
    return x.dtype, x.device, x.shape


def _have_equal_weights(tower: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two towers are the same computation with the same weights. One synchronization."""
    if tower.config._attn_implementation != other.config._attn_implementation:
        return False
    if [*map(plain_attributes, tower.modules())] != [*map(plain_attributes, other.modules())]:
        return False
    tensors, others = _weights(tower), _weights(other)
    if [*map(_description, tensors)] != [*map(_description, others)]:
        return False
    with torch.no_grad():
        differ = [(x != y).any().to(tower.device) for x, y in zip(tensors, others, strict=True) if x is not y]
        return not differ or not torch.stack(differ).any().item()
