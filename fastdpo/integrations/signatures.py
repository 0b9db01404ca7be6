"""Compares the functions that a trainer line replaces with those that it was tested with."""

from __future__ import annotations

import inspect


def signature_difference(owner: object, name: str, expected: list[str], *, exact: bool = True) -> str | None:
    """Returns how the parameters of a function differ from the expected ones, or None.

    Args:
        owner: the class or module that has the function, or should have it.
        name: of the function.
        expected: names of parameters, in order.
        exact: whether there may be no further parameters after them.
    """
    function = getattr(owner, name, None)
    parameters = None if function is None else list(inspect.signature(function).parameters)
    compared = parameters if exact or parameters is None else parameters[: len(expected)]
    if compared == expected:
        return None
    rule = "have" if exact else "begin with"
    return f"{getattr(owner, '__name__', owner)}.{name} must {rule} the parameters {expected}; got {parameters}"
