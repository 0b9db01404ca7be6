"""The functions of flash-attention libraries that fastdpo calls: their parameters, as published and as recorded.

`flash_functions.json` records the parameters of each version, by which stand-ins are made. Those of packages on the
index are compared with the packages, which `make test` downloads into the folder `FLASH_SOURCES`.

    FLASH_SOURCES=.venv/flash-attention python -m tests.support.stand_ins.flash_sources

prints the record of the packages there.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import ROOT

RECORD = ROOT / "tests" / "kernels" / "flash_functions.json"
VARIABLE = "FLASH_SOURCES"


class Library(NamedTuple):
    """A version of a library.

    Attributes:
        backend: that calls it.
        source: an archive on the package index, or the repository and commit, and the file in it.
        functions: by name, the parameters as Python prints them.
    """

    backend: str
    source: tuple[str, str]
    functions: dict[str, str]

    @property
    def is_on_the_index(self) -> bool:
        return self.source[0].endswith((".whl", ".tar.gz"))

    def signatures(self) -> dict[str, inspect.Signature]:
        """The parameters of each function."""
        return {name: _signature(ast.parse(f"def {name}{x}: pass"), name) for name, x in self.functions.items()}


@cache
def recorded() -> dict[str, Library]:
    """The versions that fastdpo supports, by name."""
    content = json.loads(RECORD.read_text())
    return {name: Library(x["backend"], tuple(x["source"]), x["functions"]) for name, x in content.items()}


def published(library: Library, folder: Path) -> dict[str, str]:
    """The parameters of the functions in a package."""
    tree = ast.parse(text(folder, *library.source))
    return {name: str(_signature(tree, name)) for name in library.functions}


def text(folder: Path, archive: str, name: str) -> str:
    """A file in a wheel, or in an sdist, in which a folder of the sdist's name holds it."""
    if archive.endswith(".whl"):
        with zipfile.ZipFile(folder / archive) as wheel:
            return wheel.read(name).decode()
    with tarfile.open(folder / archive) as sdist:
        file = sdist.extractfile(f"{archive.removesuffix('.tar.gz')}/{name}")
        assert file is not None
        return file.read().decode()


def function(source: str, name: str) -> Any:
    """A function of a source file alone, without its decorators."""
    node = _definition(ast.parse(source), name)
    node.decorator_list.clear()
    names: dict[str, Any] = {}
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, node], []))
    exec(compile(module, name, "exec"), names)
    return names[name]


def refusals(source: str, name: str) -> set[str]:
    """The messages of a function's assertions."""
    asserts = (node for node in ast.walk(_definition(ast.parse(source), name)) if isinstance(node, ast.Assert))
    return {node.msg.value for node in asserts if isinstance(node.msg, ast.Constant)}


def _signature(tree: ast.Module, name: str) -> inspect.Signature:
    """The names and defaults of a function's parameters."""
    node = _definition(tree, name)
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    node.body, node.decorator_list, node.returns = [ast.Pass()], [], None
    names: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), name, "exec"), names)
    return inspect.signature(names[name])


def _definition(tree: ast.Module, name: str) -> ast.FunctionDef:
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


if __name__ == "__main__":
    folder = Path(os.environ[VARIABLE])
    found = {name: x._replace(functions=published(x, folder)) for name, x in recorded().items() if x.is_on_the_index}
    print(json.dumps({name: x._asdict() for name, x in found.items()}, indent=1))
