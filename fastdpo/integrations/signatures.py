"""Compares the functions that a trainer line replaces with those that it was tested with."""

from __future__ import annotations

import inspect

from ..reasons import Reason
from . import evidence


def signature_difference(owner: object, name: str, expected: list[str], *, exact: bool = True) -> Reason | None:
    """Returns how the parameters of a function differ from the expected ones, or None.

    Notes the function as one that is relied on (`evidence.noting`).

    Args:
        owner: the class or module that has the function, or should have it.
        name: of the function.
        expected: names of parameters, in order.
        exact: whether there may be no further parameters after them.
    """
    function = getattr(owner, name, None)
    evidence.note(function)
    parameters = None if function is None else list(inspect.signature(function).parameters)
    compared = parameters if exact or parameters is None else parameters[: len(expected)]
    if compared == expected:
        return None
    rule = "have" if exact else "begin with"
    function = f"{getattr(owner, '__name__', owner)}.{name}"
    return Reason("different-code", difference=f"{function} must {rule} the parameters {expected}; got {parameters}")


def first_difference(owner: object, parameters: dict[str, list[str]], *, exact: bool = True) -> Reason | None:
    """The first `signature_difference` among functions, given their parameters by name."""
    differences = (signature_difference(owner, name, expected, exact=exact) for name, expected in parameters.items())
    return next((each for each in differences if each is not None), None)
