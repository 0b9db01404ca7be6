"""Attributes of a trainer line that stand in for stock ones, and how they go away again."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TypeVar

T = TypeVar("T")


class Replacements:
    """What one integration has put in place of stock functions."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def put(self, owner: object, name: str, replacement: object) -> None:
        """Sets an attribute of a class or a module. One that a class has inherited is inherited again afterwards."""
        own = vars(owner)
        if name in own:
            self._undo.callback(setattr, owner, name, own[name])
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """The last first."""
        self._undo.close()


def living(kind: type[T]) -> list[T]:
    """Every object of a class, or of one that inherits from it, that exists by now.

    By what refers to the class: `gc.get_objects` would hand out what other threads are still building, and break it.
    """
    found = [x for x in gc.get_referrers(kind) if type(x) is kind]
    return found + [x for inheriting in kind.__subclasses__() for x in living(inheriting)]
