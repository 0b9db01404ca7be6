"""Whether functions have the parameters with which lines call or replace them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...reasons import Reason

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def attribute_of(owner: object, path: str) -> Any:
    """The attribute of an attribute that a dotted path names, or None if there is none."""
    return functools.reduce(lambda x, name: getattr(x, name, None), path.split("."), owner)


def arguments_of(function: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name. Code around the function may take others than its signature says, and a call
    with wrong ones raises its own error.
    """
    return {**dict(zip(inspect.signature(function).parameters, args, strict=False)), **kwargs}


def parameters_of(method: Callable) -> list[str]:
    """The names of those parameters of a replaced function that the method of a line in its place takes. It has the
    stock function in front of them, and a trainer as `self`.
    """
    _, *parameters = inspect.signature(method).parameters.values()
    names = ("..." if x.kind in _VARIABLE else "self" if x.name == "trainer" else x.name for x in parameters)
    return [*dict.fromkeys(names)]


def signature_difference(name: str, function: Any, expected: Sequence[str], *, may_grow: bool) -> Reason | None:
    """Returns how the parameters of a function differ from the expected ones, or None.

    Args:
        name: of the function.
        function: or None if it is missing.
        expected: names of parameters, in order. "..." at their end stands for any others.
        may_grow: whether there may be further parameters with defaults, as in a version newer than the tested ones.
    """
    parameters = None if function is None else inspect.signature(function).parameters
    if parameters is not None and _are_expected(name, parameters, [*expected], may_grow):
        return None
    got = None if parameters is None else [*parameters]
    return Reason("different-code", difference=f"{name} must have the parameters {[*expected]}; got {got}")


def _are_expected(name: str, parameters: Mapping[str, inspect.Parameter], expected: list[str], may_grow: bool) -> bool:
    names, known = [*parameters], [x for x in expected if x != "..."]
    begins_as_expected = names[: len(known)] == known
    if begins_as_expected and (expected[-1] == "..." or len(names) == len(known)):
        return True
    others = [x for other, x in parameters.items() if other not in known]
    if not may_grow or not all(x.default is not x.empty or x.kind in _VARIABLE for x in others):
        return False
    # `__init__` is called with names. Other functions may be given their arguments in order.
    return [x for x in names if x in known] == known if name.endswith(".__init__") else begins_as_expected
