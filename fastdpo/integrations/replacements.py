"""Replaces attributes, and restores them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_INHERITED = object()


class Replacements:
    """The attributes of classes, modules and objects that one trainer line has replaced.

    `str()` lists their names.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._names: list[str] = []

    def put(self, owner: object, name: str, replacement: object) -> None:
        """Sets an attribute of a class, a module or an object. An inherited attribute
        is inherited again after `undo`, and one that other code has deleted since stays deleted.
        """
        self._undo.callback(_restore, owner, name, vars(owner).get(name, _INHERITED))
        self._names.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
        setattr(owner, name, replacement)

    def wrap(self, owner: Any, name: str, function: Callable) -> None:
        """Replaces a function of a class or a module.

        Args:
            owner: the class or the module.
            name: of the function.
            function: called instead, with the function that it replaces as its first argument, in
                front of those of the call.
        """
        stock = getattr(owner, name)

        @functools.wraps(stock)
        def replacement(*args, **kwargs):
            return function(stock, *args, **kwargs)

        self.put(owner, name, replacement)

    def on_undo(self, function: Callable[[], object]) -> None:
        """Has a function called by `undo`, which undoes something else than an attribute."""
        self._undo.callback(function)

    def undo(self) -> None:
        """Restores all attributes, the last one first."""
        self._undo.close()
        self._names.clear()

    def __str__(self) -> str:
        return ", ".join(self._names)


def _restore(owner: object, name: str, before: object) -> None:
    if name not in vars(owner):
        return
    if before is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of an object during the block. They must have values before it."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def existing_instances(kind: type[T]) -> list[T]:
    """Every instance of a class and of its subclasses that exists now.

    Looks at what refers to the class. `gc.get_objects` would return objects that other threads are
    still creating.
    """
    instances = [x for x in gc.get_referrers(kind) if type(x) is kind]
    return instances + [x for subclass in kind.__subclasses__() for x in existing_instances(subclass)]
