"""The contents of the wheel and of the sdist, and the direction of imports between packages.

The folder `kernels/` must not be importable as a top-level package.
"""

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from contextlib import suppress
from email import message_from_bytes
from email.message import Message
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import fastdpo
from fastdpo.integrations.registry import ENTRIES

ROOT = Path(__file__).parents[1]

ARROWS = {  # a package or a module, and those of the project that it may import
    "kernels": set(),
    "atomic_files": set(),
    "checks": set(),
    "reasons": set(),
    "row_forms": {"checks"},
    "packing": {"checks", "prefix_tree", "reasons", "row_forms"},
    "distributed": set(),
    "logs": set(),
    "accuracy": set(),
    "data": {"checks"},
    "ops.devices": set(),
    "ops.second_derivatives": set(),
    "ops.memory": {"logs", "ops.devices"},
    "ops.choice": {"accuracy", "atomic_files", "distributed", "logs", "ops.devices"},
    "ops.head": {"checks", "kernels", "logs", "packing"}
    | {"ops.choice", "ops.devices", "ops.memory", "ops.second_derivatives"},
    "ops.attention": {"accuracy", "checks", "kernels", "logs", "packing"}
    | {"ops.choice", "ops.devices", "ops.head", "ops.second_derivatives"},
    "ops.losses": {"checks", "ops.devices", "ops.head", "packing"},
    "ops.definitions": {"ops.attention", "ops.head", "ops.losses"},
    "metrics": {"checks", "ops"},
    "models": {"accuracy", "checks", "distributed", "logs", "ops", "packing", "reasons"},
    "ref_logps": {"atomic_files", "checks", "data", "distributed", "logs", "models", "ops", "packing", "reasons"},
    "integrations": {"checks", "data", "distributed", "logs", "models", "ops", "packing", "prefix_tree"}
    | {"reasons", "ref_logps", "row_forms"},
    "commands": {"accuracy", "checks", "data", "integrations", "logs", "models", "ops", "packing"}
    | {"reasons", "ref_logps"},
}
"""A part that stands inside of another one has arrows of its own. An arrow to a part reaches those inside it."""


def _modules() -> dict[str, Path]:
    """Maps the dotted names of all modules of the package to their files."""
    files = [*(ROOT / "fastdpo").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]
    names = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "fastdpo" else ("fastdpo", *parts)
        names[".".join(part for part in parts if part != "__init__")] = file
    return names


def _imports(name: str, file: Path, modules: dict[str, Path]) -> set[str]:
    """The project's modules that a file imports.

    `from package import module` counts as an import of the module.
    """
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    imported: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join(filter(None, (*base, node.module)))
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                imported.add(submodule if submodule in modules else source)
    return imported & modules.keys()


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Maps the modules of the package, except itself, to those that they import."""
    modules = _modules()
    return {name: _imports(name, file, modules) for name, file in modules.items() if name != "fastdpo"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the repository, as other processes may build in this one."""
    copy = tmp_path_factory.mktemp("clones") / "fastdpo"
    for name in tracked_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def dist(clone, tmp_path_factory) -> Path:
    """A directory with the sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", out, clone)
    return out


def python(*arguments: str | Path, executable: str | Path = sys.executable, **options) -> str:
    """The output of a Python process that must succeed."""
    done = subprocess.run([executable, *arguments], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(dist) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def tracked_files(*folders: str) -> list[str]:
    tracked = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True)
    return [name for name in tracked.stdout.split("\0") if name and os.path.lexists(ROOT / name)]


def package_files() -> set[str]:
    """The files of the package under their names in the wheel."""
    names = {
        name for name in tracked_files("fastdpo", "kernels") if name.endswith((".py", ".toml", ".json", "py.typed"))
    }
    return {f"fastdpo/{name}" if name.startswith("kernels/") else name for name in names}


def test_wheel_holds_the_package_the_kernels_and_nothing_else(wheel):
    expected = package_files()
    assert "fastdpo/kernels/token_logps.py" in expected
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_sdist_holds_what_the_wheel_is_built_from_and_nothing_else(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    made = {"PKG-INFO", "setup.cfg", *(name for name in names if name.startswith("src/fastdpo.egg-info/"))}
    texts = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md", "docs/package.md"}
    assert names - made == {f"src/{name}" for name in package_files()} | texts | {"pyproject.toml"}


NEXT_TO_A_CLONE = """
import pathlib
from importlib.util import find_spec
import fastdpo
clone = pathlib.Path("fastdpo").absolute()
print(fastdpo.__version__, *(path.name for path in clone.glob("[!.]*/") if str(clone) in str(find_spec(path.name))))
"""


def test_an_editable_install_is_found_next_to_its_clone(clone, tmp_path):
    """README's layout: a script, and a clone whose folder has the name of the package. Nothing else of it is found."""
    python("-m", "venv", "--without-pip", tmp_path)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))  # torch, and what builds
    to_it = ["-m", "pip", "--python", tmp_path / "bin" / "python"]
    python(*to_it, "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", clone)
    script = clone.parent / "script.py"
    script.write_text(NEXT_TO_A_CLONE)
    found = python(script, executable=tmp_path / "bin" / "python", cwd=clone.parent)
    assert found == f"{fastdpo.__version__} fastdpo\n"


def test_metadata(metadata):
    assert metadata["Version"] == fastdpo.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    classifiers = metadata.get_all("Classifier")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    assert f"version: {fastdpo.__version__}" in (ROOT / "CITATION.cff").read_text().splitlines()


def test_the_description_needs_no_repository_around_it(metadata):
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "fastdpo.patch()" in text
    links = [*re.findall(r"\]\(([^)]*)\)", text), *re.findall(r'(?:src|href)="([^"]*)"', text)]
    assert not [link for link in links if not link.startswith("https://")]


def test_the_extra_for_trl_takes_newer_versions(metadata):
    """They are patched if their code passes checks. Only the extra for TRL before its rewrite has upper bounds."""
    requirements = [Requirement(x) for x in metadata.get_all("Requires-Dist")]
    (entry,) = (entry for entry in ENTRIES if entry.line_class == "trl.dpo:DPOLine")
    (trl,) = (x for x in requirements if x.name == "trl" and x.marker.evaluate({"extra": "trl"}))
    assert trl.specifier == SpecifierSet(entry.versions.partition(",")[0])
    bounded = [x for x in requirements if any(bound.operator != ">=" for bound in x.specifier)]
    assert {x.name for x in bounded} == {"trl", "transformers"}
    assert all('extra == "trl-legacy"' in str(x.marker) for x in bounded)


PUBLIC = ("fastdpo", "fastdpo.__main__", "fastdpo.metrics", "fastdpo.ops", "fastdpo.ops.definitions", "fastdpo.packing")
PUBLIC += ("fastdpo.models.attention", "fastdpo.ref_logps", "fastdpo.commands.run")

IMPORT = """
import importlib, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

REFUSED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refused())
for name in sys.argv[2].split(","):
    importlib.import_module(name)
print(importlib.import_module("fastdpo").__file__)
"""


def requirements_of(distribution: str, requires: list[str], found: dict[str, str]) -> None:
    """Adds the modules that a distribution requires, directly and indirectly, to `found`."""
    for requirement in map(Requirement, requires):
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[name] = distribution
            with suppress(importlib.metadata.PackageNotFoundError):  # of another platform
                requirements_of(name, importlib.metadata.distribution(name).requires or [], found)


def test_a_wheel_without_extras_imports_every_public_module(wheel, metadata, tmp_path):
    """Nothing but its requirements and theirs can be imported."""
    wheel.extractall(tmp_path)
    allowed: dict[str, str] = {}
    requirements_of("fastdpo", metadata.get_all("Requires-Dist"), allowed)
    assert {"torch", "numpy", "tqdm"} <= allowed.keys()
    assert not {"trl", "transformers", "datasets"} & allowed.keys()
    modules = importlib.metadata.packages_distributions()
    refused = {x for x, names in modules.items() if allowed.keys().isdisjoint(map(canonicalize_name, names))}
    refused.discard("fastdpo")
    assert "transformers" in refused
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = python("-c", IMPORT, ",".join(sorted(refused)), ",".join(PUBLIC), env=environment, cwd=tmp_path)
    assert found.strip() == str(tmp_path / "fastdpo" / "__init__.py")


def test_the_root_has_no_package_named_kernels():
    """Python started in the root must import Hugging Face's `kernels`, which transformers needs."""
    assert (ROOT / "fastdpo" / "kernels").is_symlink()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s is None or s.loader is None)"
    assert python("-c", code, cwd=ROOT) == "True\n"


def part_of(module: str) -> str | None:
    """The part of the project that a module belongs to, the innermost one."""
    parts = [part for part in ARROWS if is_within(module, {part})]
    return max(parts, key=len, default=None)


def is_within(module: str, parts: set[str]) -> bool:
    return any(f"{module}.".startswith(f"fastdpo.{part}.") for part in parts)


@pytest.mark.parametrize("part", ARROWS)
def test_imports_follow_the_arrows(part, imports):
    for module, imported in imports.items():
        if part_of(module) == part:
            refused = {x for x in imported if x != "fastdpo" and not is_within(x, ARROWS[part] | {part})}
            assert not refused, f"{module} imports {refused}"


def test_imports_have_no_cycle(imports):
    """Imports inside functions and imports for type annotations count as well."""
    of_version = [name for name, imported in imports.items() if "fastdpo" in imported]
    assert sorted(of_version) == ["fastdpo.__main__", "fastdpo.commands.doctor"]
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_of_tools_have_no_cycle():
    files = [*(ROOT / "tools").rglob("*.py")]
    modules = {".".join(x.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): x for x in files}
    TopologicalSorter({name: _imports(name, file, modules) for name, file in modules.items()}).prepare()


def test_arrows_have_no_cycle():
    """So parts import each other in none, not even by different modules."""
    reached = {part: {x for x in ARROWS if is_within(f"fastdpo.{x}", arrows)} for part, arrows in ARROWS.items()}
    TopologicalSorter(reached).prepare()


NAMES_OF_OTHERS = {"_fields", "_init_fn"}
"""Of named tuples, and of custom ops in PyTorch: what a test reads of the project's own has these names."""


def private_names(source: str) -> set[str]:
    """The private names of the project's modules that a file reads or replaces."""
    tree = list(ast.walk(ast.parse(source)))
    imported = [node for node in tree if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastdpo")]
    modules = {alias.asname or alias.name for node in imported for alias in node.names} | {"fastdpo"}
    found = {alias.name for node in imported for alias in node.names}

    def is_of_the_project(node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in modules

    for node in tree:
        if isinstance(node, ast.Attribute) and is_of_the_project(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "object")) and node.args:
            path = ".".join(x.value for x in node.args[:2] if isinstance(x, ast.Constant) and isinstance(x.value, str))
            if is_of_the_project(node.args[0]) or path.startswith("fastdpo."):
                found.add(path.rpartition(".")[2])
    return {name for name in found if re.match("_[^_]", name)} - NAMES_OF_OTHERS


def test_moving_a_function_breaks_no_test():
    """Faults are planted through public names, most of them by tests.support.faults.

    Only Triton's functions have no public name: tests compile them, and record their launches.
    """
    read = {str(path.relative_to(ROOT)): private_names(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    read = {path: {name for name in names if not name.endswith("_kernel")} for path, names in read.items()}
    assert {path: names for path, names in read.items() if names} == {}
