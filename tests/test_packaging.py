"""The contents of the wheel, and the direction of imports between packages.

The folder `kernels/` must not be importable as a top-level package.
"""

import ast
import shutil
import subprocess
import sys
import zipfile
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ARROWS = {  # a package, and the packages of the project that it may import
    "kernels": set(),
    "checks": set(),
    "packing": {"checks"},
    "distributed": set(),
    "logs": set(),
    "ops": {"checks", "kernels", "logs", "packing"},
    "metrics": {"checks", "ops"},
    "models": {"checks", "distributed", "logs", "ops", "packing"},
    "ref_logps": {"checks", "distributed", "logs", "models", "ops", "packing"},
    "integrations": {"checks", "distributed", "logs", "models", "ops", "packing", "ref_logps"},
    "run": {"checks", "integrations", "startup"},
}


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


MODULES = _modules()
IMPORTS = {name: _imports(name, file, MODULES) for name, file in MODULES.items() if name != "fastdpo"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    out = tmp_path_factory.mktemp("dist")
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # otherwise files of an earlier build are included
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def test_wheel_holds_the_package_the_kernels_and_nothing_else(wheel):
    tracked = subprocess.run(["git", "ls-files", "fastdpo", "kernels"], cwd=ROOT, capture_output=True, text=True)
    expected = {name for name in tracked.stdout.split() if name.endswith((".py", "py.typed"))}
    expected = {f"fastdpo/{name}" if name.startswith("kernels/") else name for name in expected}
    assert "fastdpo/kernels/token_logps.py" in expected
    assert {name for name in wheel if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_the_root_has_no_package_named_kernels():
    """Python started in the root must import Hugging Face's `kernels`, which transformers needs."""
    assert (ROOT / "fastdpo" / "kernels").is_symlink()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s is None or s.loader is None)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("part", ARROWS)
def test_imports_follow_the_arrows(part):
    for module, imported in IMPORTS.items():
        if module.split(".")[1] == part:
            reached = {target.split(".")[1] for target in imported}
            assert reached <= ARROWS[part] | {part}, f"{module} imports {reached - ARROWS[part]}"


def test_imports_have_no_cycle():
    """Imports inside functions and imports for type annotations count as well."""
    assert [name for name, imported in IMPORTS.items() if "fastdpo" in imported] == ["fastdpo.startup.sitecustomize"]
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_an_import_cycle_is_detected():
    with pytest.raises(CycleError):
        TopologicalSorter(
            {**IMPORTS, "fastdpo.packing": {"fastdpo.ops.packed_attention", "fastdpo.models.forward"}}
        ).prepare()
