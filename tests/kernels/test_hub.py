"""The form of the kernels for the Kernel Hub, loaded by Hugging Face's package `kernels` without a network.

The package is not in the environment, since transformers looks for kernels on the Hub wherever it is.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.workers.packages import packages

LOAD = """
import json, sys
from pathlib import Path

import torch

torch.version.cuda, torch.version.hip = json.loads(sys.argv[2])  # there is one kind of backend in a build of torch
import kernels

hub = kernels.get_local_kernel(Path(sys.argv[1]))
torch.version.cuda = torch.version.hip = None
(loaded,) = kernels.get_loaded_kernels()
print(json.dumps([loaded.metadata.id, str(loaded.metadata.name), loaded.metadata.version, hub.__file__, hub.__all__]))
logits, targets = torch.randn(5, 70), torch.tensor([0, 69, -100, 7, 7])
logps = hub.token_logps.token_logps_fwd(logits, targets, None, 1.0, 1.0, "")[0]
exact = logits.double().log_softmax(1).gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets >= 0)
assert torch.allclose(logps.double(), exact, rtol=0, atol=1e-5), (logps, exact)
assert "fastdpo" not in sys.modules
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "repository"
    build = [sys.executable, str(ROOT / "tools" / "kernel_hub.py"), str(path)]
    subprocess.run(build, check=True)
    again = subprocess.run(build, capture_output=True, text=True)
    assert "FileExistsError" in again.stderr
    return path


def test_the_files_are_those_of_the_kernels(repository):
    names = {path.name for path in (ROOT / "kernels").glob("*.py")}
    assert {path.name for path in (repository / "build").iterdir()} == {"torch-cuda", "torch-rocm"}
    for variant in (repository / "build").iterdir():
        assert {path.name for path in variant.iterdir()} == names | {"__init__.py", "metadata.json"}
        assert all((variant / name).read_bytes() == (ROOT / "kernels" / name).read_bytes() for name in names)


@pytest.mark.parametrize(("backend", "versions"), [("cuda", ["12.8", None]), ("rocm", [None, "6.4.0"])])
def test_the_package_kernels_loads_and_runs_them(repository, tmp_path, backend, versions):
    """In Triton's interpreter."""
    added = {"PYTHONPATH": str(packages("HUB_KERNELS")), "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, str(repository), json.dumps(versions)]
    done = subprocess.run(command, env={**os.environ, **added}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    identifier, name, version, file, modules = json.loads(done.stdout)
    assert identifier.startswith(f"_fastdpo_{backend}_")
    assert (name, version) == ("fastdpo", 1)
    assert Path(file) == repository / "build" / f"torch-{backend}" / "__init__.py"
    assert sorted(modules) == sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))
