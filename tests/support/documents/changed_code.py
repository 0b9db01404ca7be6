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
from typing import Any

from fastdpo.integrations.admission import packages, tested_code
from tests.support.documents.tested_code import newest_lines, relied_on


def differing() -> dict[str, Any]:
    """The functions that differ, by their names, and printed reasons of lines that are off."""
    print(packages.missing_reason() or "All names are there that fastdpo relies on in the packages below trainers")
    found = {}
    for line in newest_lines():
        try:
            reason = line.unsupported_reason()
            functions = relied_on(line)
        except (AttributeError, ImportError, RuntimeError) as error:
            reason, functions = f"{type(error).__name__}: {error}", {}
        if reason is not None:
            print(f"{line.name}: off, {reason}")
        found |= {name: functions[name] for name in tested_code.differing(functions, line.newer)}
    return found


def source_in(directory: Path, name: str) -> str | None:
    """The source of a function by its dotted name, from files of a directory, or None."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        for file in (directory.joinpath(*parts[:i]).with_suffix(".py"), directory.joinpath(*parts[:i], "__init__.py")):
            if file.is_file():
                return _definition(ast.parse(file.read_text(encoding="utf-8")), parts[i:])
    return None


def _definition(node: ast.AST, parts: list[str]) -> str | None:
    for part in parts:
        node = next((x for x in getattr(node, "body", ()) if getattr(x, "name", None) == part), None)
        if node is None:
            return None
    return ast.unparse(node)


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
    for name, function in differences.items():
        state = "missing" if function is None else "differs" if name in tested_code.hashes() else "new"
        print(f"\n{name}: {state}")
        inner = inspect.unwrap(function) if function is not None else None
        tested = directory and inner and source_in(directory, f"{inner.__module__}.{inner.__qualname__}")
        if tested:
            texts = normal_form(tested), normal_form(inspect.getsource(inner))
            print("\n".join(difflib.unified_diff(*texts, "tested", "installed", lineterm="")))
    print(f"\n{len(differences)} functions differ from the tested ones")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
