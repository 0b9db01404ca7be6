"""What is shipped, what imports what, and that the folder `kernels/` is nobody's top-level package."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ARROWS = {  # a package, and the parts of the project that it may import
    "kernels": set(),
    "packing": set(),
    "ops": {"kernels", "packing", "ops"},
    "attention": {"ops", "packing"},
    "metrics": {"ops"},
    "ref_logps": {
        "ops",
        "packing",
        "integrations",
        "ref_logps",
    },  # a model is made to score by the wrapper of a forward
    "integrations": {"attention", "ops", "packing", "integrations", "ref_logps"},  # which TRL's precompute is handed to
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    out = tmp_path_factory.mktemp("dist")
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


def test_the_root_offers_no_package_named_kernels():
    """Hugging Face's `kernels`, which transformers imports, must win for whoever starts Python here."""
    assert (ROOT / "fastdpo" / "kernels").is_symlink()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s is None or s.loader is None)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("part", ARROWS)
def test_imports_follow_the_arrows(part):
    home = ROOT / "kernels" if part == "kernels" else ROOT / "fastdpo" / part
    files = list(home.rglob("*.py")) if home.is_dir() else [home.with_suffix(".py")]
    assert files
    for file in files:
        package = ("fastdpo", *file.relative_to(ROOT / "fastdpo" if part != "kernels" else ROOT).parts[:-1])
        reached = {target.split(".")[1] for target in _project_imports(file, package) if "." in target}
        assert reached <= ARROWS[part] | {part}, f"{file.relative_to(ROOT)} imports {reached - ARROWS[part]}"


def _project_imports(file: Path, package: tuple[str, ...]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "fastdpo"}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module.split(".")[0] == "fastdpo":
                found |= {f"{module}.{alias.name}" for alias in node.names} if module == "fastdpo" else {module}
    return found
