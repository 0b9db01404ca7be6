"""Prints which functions of the installed packages differ from the tested ones, with a diff of what they do.

    python -m tests.support.documents.changed_code [DIRECTORY]

The tested source is read from DIRECTORY, into which `pip install --target` has put the tested versions. The exit
status is 0 whatever differs.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from pathlib import Path
from types import FunctionType

from fastdpo.integrations.admission import evidence, fingerprints, packages
from fastdpo.integrations.admission.versions import installed_version
from fastdpo.integrations.lines import LINES
from tests.support.documents.tested_code import functions_of_options


def differing() -> dict[str, object]:
    """The functions and constants that differ, by their names, and printed reasons of lines that are off."""
    found: dict[str, object] = {}
    for package in packages.PACKAGES:
        if installed_version(package) is not None and packages.is_newer(package):
            try:
                found |= packages.functions_of(package)
            except ImportError as error:
                print(f"{package}: {error}")
            reason = packages.missing_reason((package,))
            if reason is not None:
                print(f"{package}: {reason}")
    for line in LINES:
        newest = next(x for x in LINES if x.trainer == line.trainer)
        version = installed_version(line.package)
        if line is not newest or version is None or not evidence.has_tested(line.package):
            continue
        evidence.set_newer(line.package, not line.supports(version))
        with evidence.noting() as functions:
            try:
                reason = line.load().unsupported_reason()
            except (AttributeError, ImportError, RuntimeError) as error:
                reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            print(f"{line.trainer}: off, {reason}")
        for name, function in functions.items():
            inner = fingerprints.inner(function)
            if fingerprints.package_of(name) == line.package and isinstance(inner, FunctionType):
                found |= fingerprints.reached(inner)
        found |= functions_of_options(line, [line.package, *packages.newer()])
    return {name: x for name, x in found.items() if not evidence.is_recorded(name, x)}


def source_in(directory: Path, name: str) -> str | None:
    """The source of a function or a constant by its dotted name, from files of a directory, or None."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        for file in (directory.joinpath(*parts[:i]).with_suffix(".py"), directory.joinpath(*parts[:i], "__init__.py")):
            if file.is_file():
                return _definition(ast.parse(file.read_text(encoding="utf-8")), parts[i:])
    return None


def _definition(node: ast.AST, parts: list[str]) -> str | None:
    for part in parts:
        node = next((x for x in getattr(node, "body", ()) if part in _names_of(x)), None)
        if node is None:
            return None
    return ast.unparse(node)


def _names_of(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [getattr(node, "name", ""), *(x.id for x in targets if isinstance(x, ast.Name))]


def normal_form(source: str) -> list[str]:
    """The lines of a source as a difference counts: without comments, docstrings and annotations, formatted anew."""
    tree = ast.parse(inspect.cleandoc(source) if source.startswith(" ") else source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.unparse(tree).splitlines()


def main(directory: Path | None) -> None:
    differences = differing()
    for name, value in differences.items():
        tested = None if directory is None else source_in(directory, name)
        if isinstance(value, FunctionType):
            now = fingerprints.source_of(value)
        else:
            now = f"{name.rpartition('.')[2]} = {value!r}"
        print(f"\n{name}: {'new' if name not in evidence.tested() else 'differs'}")
        if tested is not None:
            lines = difflib.unified_diff(normal_form(tested), normal_form(now), "tested", "installed", lineterm="")
            print("\n".join(lines))
    print(f"\n{len(differences)} functions and constants differ from the tested ones")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
