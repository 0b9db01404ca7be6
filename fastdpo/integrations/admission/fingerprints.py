"""What functions of a package do, as hashes, and which others they reach."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import re
import symtable
import textwrap
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

LARGEST_REACH = 400
"""The number of functions after which `reached` looks no further."""

_WITHOUT_EFFECT = {"annotation", "returns", "type_comment", "ctx", "kind"}
"""Fields of a syntax tree that do not change what a function does."""


def inner(function: Any) -> Any:
    """A function without the decorators around it, those of Triton among them."""
    while True:
        static = isinstance(function, staticmethod | classmethod | MethodType)
        within = function.__func__ if static else inspect.unwrap(function) if callable(function) else function
        within = getattr(within, "fn", within)  # Triton's kernels
        within = within.func if isinstance(within, functools.partial) else within
        if within is function:
            return function
        function = within


def name_of(function: Callable) -> str:
    """The name of the function itself, without the decorators around it."""
    found = inner(function)
    return f"{found.__module__}.{getattr(found, '__qualname__', type(found).__qualname__)}"


def attribute_of(owner: object, path: str) -> Any:
    """The attribute of an attribute that a dotted path names, or None if there is none."""
    return functools.reduce(lambda x, name: getattr(x, name, None), path.split("."), owner)


def package_of(name: str) -> str:
    return name.partition(".")[0]


def reached(function: FunctionType, ends: Collection[str] = ()) -> dict[str, object]:
    """A function, and the functions and constants of its package that compute with it, by name.

    Those are what its code names: global functions, methods of global classes, what is named of global
    modules, and methods of `self`; and what their code names in turn. Other functions whose names are
    among `ends` are left out, with what only they name.
    """
    package = package_of(function.__module__)
    found: dict[str, object] = {}
    waiting = [(function, _owner(function))]
    while waiting and len(found) < LARGEST_REACH:
        each, owner = waiting.pop()
        name = name_of(each)
        if name not in found and (name not in ends or each is function):
            found[name] = each
            for other, value in _named(each, package):
                if isinstance(value, FunctionType):
                    waiting.append((value, None))
                else:
                    found[other] = value
            waiting += [(method, owner) for method in _methods_of_self(each, owner, package)]
    return found


def _owner(function: FunctionType) -> type | None:
    """The class that a function is defined in, if any."""
    owner = function.__globals__.get(function.__qualname__.partition(".")[0])
    return owner if isinstance(owner, type) else None


def _named(function: FunctionType, package: str) -> Iterator[tuple[str, object]]:
    """The functions and constants of a package that the code of a function names."""
    variables = function.__globals__
    names = {name for code in codes_in(function.__code__) for name in code.co_names}
    spaces = [variables, *(vars(x) for name in names if isinstance(x := variables.get(name), ModuleType))]
    for name in sorted(names):
        for space in spaces:
            if package_of(space.get("__name__", "")) == package and name in space:
                yield from _parts(f"{space['__name__']}.{name}", space[name], package)


def _methods_of_self(function: FunctionType, owner: type | None, package: str) -> Iterator[FunctionType]:
    """The methods of a package that a method of a class calls on its first argument. None without a class."""
    for name in _attributes_of_self(function.__code__) if owner is not None else ():
        method = inner(inspect.getattr_static(owner, name, None))
        if _is_own(method, package):
            yield method


def _parts(name: str, value: object, package: str) -> Iterator[tuple[str, object]]:
    """A function, a constant, or the methods and constants of a class. Nothing of other packages."""
    if isinstance(value, type):
        for kind in value.__mro__:
            if package_of(kind.__module__) == package and not issubclass(kind, BaseException):
                for attribute, x in vars(kind).items():
                    yield from _parts(f"{kind.__module__}.{kind.__qualname__}.{attribute}", x, package)
    elif callable(value) or isinstance(value, staticmethod | classmethod):
        function = inner(value)
        if _is_own(function, package):
            yield name, function
    elif _is_constant(value) and not name.rpartition(".")[2].startswith("__"):
        yield name, value


def _is_own(function: object, package: str) -> TypeGuard[FunctionType]:
    """Whether a function is one of a package, and is not generated, as those of dataclasses are."""
    if not isinstance(function, FunctionType) or package_of(function.__module__ or "") != package:
        return False
    return not function.__code__.co_filename.startswith("<")


def _is_constant(value: object) -> bool:
    """Whether a value is one that computations depend on. Flags say what is installed."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _attributes_of_self(code: CodeType) -> list[str]:
    """The attributes of the first argument that the text of a method names, each once."""
    first = code.co_varnames[0] if code.co_argcount else ""
    return [*dict.fromkeys(re.findall(rf"\b{first}\.(\w+)", _text_of(code)))]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and that of functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def text_hash(value: object) -> str:
    """A hash of the text of a function, or of the value of a constant. No syntax is parsed."""
    return _hash(_text_of(value.__code__) if isinstance(value, FunctionType) else repr(value))


@functools.cache
def code_hash(function: FunctionType) -> str | None:
    """A hash of what a function does (see `hash_of`), or None if its source cannot be read."""
    try:
        return hash_of(source_of(function))
    except (OSError, SyntaxError, TypeError):
        return None


def source_of(function: FunctionType) -> str:
    """The source of a function. Raises an OSError or a TypeError if it cannot be read."""
    return textwrap.dedent(inspect.getsource(function))


@functools.cache
def _text_of(code: CodeType) -> str:
    """The lines of a function from its first decorator to its last statement. Empty if they cannot be read."""
    last = max((end or 0 for each in codes_in(code) for _, end, _, _ in each.co_positions()), default=0)
    return "".join(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last])


def hash_of(source: str) -> str:
    """A hash of the source of a function.

    Formatting, comments, docstrings, annotations and the names of local variables do not change it,
    and neither does the version of Python.
    """
    return _hash(repr(normalized(source)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def normalized(source: str) -> object:
    """The syntax tree of a function as nested tuples, without what does not change what it does."""
    tree = ast.parse(textwrap.dedent(source))
    nodes = list(ast.walk(tree))
    private = {id(x) for node in nodes if isinstance(node, ast.Lambda) for x in ast.walk(node.args)}
    kept = {node.arg for node in nodes if isinstance(node, ast.arg) and id(node) not in private}
    kept |= {name for node in nodes if isinstance(node, ast.Nonlocal) for name in node.names}
    kept |= set(_global_names(symtable.symtable(textwrap.dedent(source), "", "exec")))
    names = (name for node in nodes if (name := _name_given_by(node)) is not None and name not in kept)
    return _normalized(tree, {name: f"local {i}" for i, name in enumerate(dict.fromkeys(names))})


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that are global in a part of a function, its own name among them."""
    yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
    for child in table.get_children():
        yield from _global_names(child)


def _name_given_by(node: ast.AST) -> str | None:
    """The name that a part of a function gives to what only the function sees, if any."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.FunctionDef | ast.ExceptHandler):
        return node.name
    if isinstance(node, ast.alias):
        return node.asname or (None if "." in node.name else node.name)
    return node.arg if isinstance(node, ast.arg) else None


def _normalized(node: object, local: dict[str, str]) -> object:
    if isinstance(node, list):
        return [_normalized(x, local) for x in node if not _is_docstring(x)]
    if isinstance(node, ast.Name):
        return local.get(node.id, node.id)
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign([node.target], node.value)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _WITHOUT_EFFECT}
    if isinstance(node, ast.FunctionDef | ast.ExceptHandler | ast.arg):
        field = "arg" if isinstance(node, ast.arg) else "name"
        fields[field] = local.get(fields[field], fields[field])
    elif isinstance(node, ast.alias) and (name := _name_given_by(node)) in local:
        fields["asname"] = local[name]
    # A later Python may add fields, which are empty in earlier code.
    return type(node).__name__, [(name, _normalized(x, local)) for name, x in fields.items() if x not in (None, [])]


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
