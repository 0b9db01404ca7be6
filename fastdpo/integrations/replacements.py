"""Replaces attributes of classes and modules, and restores them."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TypeVar

T = TypeVar("T")


class Replacements:
    """The attributes that one trainer line has replaced."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def put(self, owner: object, name: str, replacement: object) -> None:
        """Sets an attribute of a class or a module. An inherited attribute
        is inherited again after `undo`.
        """
        attributes = vars(owner)
        if name in attributes:
            self._undo.callback(setattr, owner, name, attributes[name])
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Restores all attributes, the last one first."""
        self._undo.close()


def existing_instances(kind: type[T]) -> list[T]:
    """Every instance of a class and of its subclasses that exists now.

    Looks at what refers to the class. `gc.get_objects` would return objects that other threads are
    still creating.
    """
    instances = [x for x in gc.get_referrers(kind) if type(x) is kind]
    return instances + [x for subclass in kind.__subclasses__() for x in existing_instances(subclass)]
