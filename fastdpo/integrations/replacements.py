"""Replaces attributes of classes, modules and objects, and restores them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_INHERITED = object()


class Replacements(ExitStack):
    """Attributes that are replaced until `close` is called, which restores the last one first. More can be put into it
    afterwards.
    """

    def put(self, owner: object, name: str, replacement: object) -> None:
        """Sets an attribute of a class, a module or an object. An inherited attribute
        is inherited again after `close`, and one that other code has deleted since stays deleted.
        """
        self.callback(_restore, owner, name, vars(owner).get(name, _INHERITED))
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
