"""Replaces attributes of a trainer and restores them, makes its callbacks, and finds trainers that exist."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainerCallback

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
def temporarily(owner: object, **attributes: Any) -> Iterator[None]:
    """Sets attributes of an object during the block. Those that it inherits, such as methods, are inherited again
    after it.
    """
    before = {name: vars(owner).get(name, _INHERITED) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            _restore(owner, name, value)


def callback(**events: Callable[..., None]) -> TrainerCallback:
    """A callback with these functions of a trainer's arguments, state and control, by the names of their events.

    transformers is imported when the first one is made.
    """
    from transformers import TrainerCallback

    return type("FastDPOCallback", (TrainerCallback,), {name: staticmethod(x) for name, x in events.items()})()


def existing_instances(*kinds: type) -> list[Any]:
    """Every instance of these classes and of their subclasses that exists now.

    Looks once at what refers to the classes, which takes as long for all of them as for one.
    `gc.get_objects` would return objects that other threads are still creating.
    """
    classes = [each for kind in kinds for each in (kind, *_subclasses(kind))]
    known = {id(x) for x in classes}
    found = {id(x): x for x in gc.get_referrers(*classes) if id(type(x)) in known}
    return list(found.values())


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
