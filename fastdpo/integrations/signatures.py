"""Compares the functions that a trainer line replaces with those that it was tested with."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping

from ..reasons import Reason
from . import evidence


def signature_difference(owner: object, name: str, expected: list[str], *, exact: bool = True) -> Reason | None:
    """Returns how the parameters of a function differ from the expected ones, or None.

    Notes the function as one that is relied on (`evidence.noting`). One of a version newer than the tested
    ones may have further parameters with defaults, which its code then reads: that has changed, too.

    Args:
        owner: the class or module that has the function, or should have it.
        name: of the function.
        expected: names of parameters, in order.
        exact: whether there may be no further parameters after them.
    """
    function = getattr(owner, name, None)
    evidence.note(function)
    parameters = None if function is None else inspect.signature(function).parameters
    if parameters is not None and _are_expected(name, parameters, expected, exact, evidence.is_newer(function)):
        return None
    parameters = parameters and list(parameters)
    rule = "have" if exact else "begin with"
    function = f"{getattr(owner, '__name__', owner)}.{name}"
    return Reason("different-code", difference=f"{function} must {rule} the parameters {expected}; got {parameters}")


def _are_expected(
    name: str, parameters: Mapping[str, inspect.Parameter], expected: list[str], exact: bool, is_newer: bool
) -> bool:
    names = list(parameters)
    if names == expected or (names[: len(expected)] == expected and not exact):
        return True
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    others = [x for other, x in parameters.items() if other not in expected]
    if not is_newer or not all(x.default is not x.empty or x.kind in variable for x in others):
        return False
    # `__init__` is called with names. Other functions may be given their arguments in order.
    return (names if name != "__init__" else [x for x in names if x in expected])[: len(expected)] == expected


def first_difference(owner: object, parameters: Mapping[str, list[str]], *, exact: bool = True) -> Reason | None:
    """The first `signature_difference` among functions, given their parameters by name."""
    differences = (signature_difference(owner, name, expected, exact=exact) for name, expected in parameters.items())
    return next((each for each in differences if each is not None), None)


def field_difference(kind: type, expected: set[str], *, may_have_more: bool = False) -> Reason | None:
    """Returns how the fields of a dataclass differ from the expected ones, or None."""
    names = {field.name for field in dataclasses.fields(kind)}
    if names == expected or (may_have_more and names > expected):
        return None
    difference = f"{kind.__name__} must have the fields {sorted(expected)}; got {sorted(names)}"
    return Reason("different-code", difference=difference)
