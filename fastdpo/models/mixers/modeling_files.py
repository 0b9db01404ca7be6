"""Replaces functions in the globals of modeling files for as long as models need it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ...packing import is_layout
from ..parts import language_model
from . import known
from .finding import forward_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CREATE_MASK = "create_recurrent_attention_mask"
"""The function by which modeling files make the masks of mixers."""


@dataclass
class _File:
    """A modeling file.

    Attributes:
        namespace: its globals.
        replaced: what takes the place of functions, by their names.
        users: ids of the models that need the replacements.
    """

    namespace: dict[str, Any]
    replaced: dict[str, Callable] = field(default_factory=dict)
    users: set[int] = field(default_factory=set)

    def replace(self) -> None:
        for name in (known.WRAPPED | {CREATE_MASK}) & self.namespace.keys() - self.replaced.keys():
            original = known.original_of(self.namespace[name])
            if not isinstance(known.function_inside(original), FunctionType):  # a module that holds a kernel
                continue
            replacement = _passing_layouts(original) if name == CREATE_MASK else known.wrapper(name, original)
            self.namespace[name] = self.replaced[name] = replacement

    def restore(self) -> None:
        for name, replacement in self.replaced.items():
            if self.namespace[name] is replacement:  # otherwise other code has replaced it since
                self.namespace[name] = vars(replacement)["__wrapped__"]


_files: dict[int, _File] = {}
"""By the id of their globals."""


def switch(model: PreTrainedModel) -> None:
    """Makes the functions of a model's modeling files take packed tokens as well."""
    for module in language_model(model).modules():
        namespace = getattr(forward_of(type(module)), "__globals__", {})
        if not (known.WRAPPED | {CREATE_MASK}) & namespace.keys():
            continue
        file = _files.setdefault(id(namespace), _File(namespace))
        file.replace()
        if id(model) not in file.users:
            file.users.add(id(model))
            weakref.finalize(model, release, id(model)).atexit = False


def release(user: int) -> None:
    """Restores the modeling files that no model but that with this id needs."""
    for key, file in list(_files.items()):
        file.users.discard(user)
        if not file.users:
            file.restore()
            del _files[key]


def _passing_layouts(original: Callable) -> Callable:
    """Makes a function that creates masks pass a layout on. transformers would return None, as for
    any mask of four dimensions.
    """

    @functools.wraps(original)
    def create_mask(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        return mask if is_layout(mask) else original(*args, **kwargs)

    return create_mask
