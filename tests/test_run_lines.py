"""`fastdpo run` patches every trainer that is installed, however a program imports it.

Trainers of the programs that have environments of their own are trained in tests/programs.
"""

import importlib.metadata

import pytest
from packaging.specifiers import SpecifierSet

from fastdpo.integrations.registry import ENTRIES
from tests.support.programs.run_command import run
from tests.support.programs.run_scripts import assert_trains_fused

INSTALLED = {
    entry.trainer: entry.trainer_module
    for entry in ENTRIES
    if entry.package == "trl" and SpecifierSet(entry.versions).contains(importlib.metadata.version("trl"))
}
"""The trainers of TRL that the installed version has, and the modules that define them."""

CLASSES = {trainer.partition(".")[2]: module for trainer, module in INSTALLED.items()}
IMPORTS = {
    "packages": [f"from {module.rpartition('.')[0]} import {name}" for name, module in CLASSES.items()],
    "modules": [f"from {module} import {name}" for name, module in CLASSES.items()],
}
PATCH = """
import fastdpo
assert all(seam.on for seam in fastdpo.patch().seams)
"""

REPLACED = """
for trainer in ({trainers}):
    file = trainer.__init__.__code__.co_filename
    assert "fastdpo" in file, f"{{trainer.__name__}} is stock: {{file}}"
"""


@pytest.mark.parametrize("source", IMPORTS)
def test_every_trainer_is_patched(source, tmp_path):
    """One program imports the trainers from their packages and calls `patch()`, which changes nothing.
    The other does not know of fastdpo.
    """
    assert len(CLASSES) == 11
    program = tmp_path / "train.py"
    patch = PATCH if source == "packages" else ""
    program.write_text("\n".join(IMPORTS[source]) + patch + REPLACED.format(trainers=", ".join(CLASSES)))
    done = run(*(word for trainer in INSTALLED for word in ("--only", trainer)), program, warm=True)
    assert done.returncode == 0, done.stderr
    version = importlib.metadata.version("trl")
    for trainer in INSTALLED:
        assert done.stderr.count(f"fastdpo: {trainer} ({version}): on\n") == 1, done.stderr


def test_an_online_training_runs_fused(tmp_path):
    """Its trainer is defined in a package that imports it while it is imported itself."""
    assert_trains_fused(tmp_path, "trl.OnlineDPOTrainer", warm=True)
