"""The report on packages that are installed in another version, or whose import fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdpo.integrations.admission.versions import DISTRIBUTIONS
from fastdpo.integrations.patching import examine


def distribution(directory: Path, name: str, version: str, *requirements: str) -> None:
    """Metadata of an installed distribution."""
    folder = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def test_a_package_whose_import_fails_is_off_with_the_reason(tmp_path):
    """As TRL 0.24 fails with transformers 5: with a RuntimeError of several lines."""
    distribution(tmp_path, "trl", "0.24.0")
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("raise RuntimeError('Failed to import:\\n  no mergekit')\n")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import fastdpo; print(fastdpo.patch())\ntry: import trl\nexcept RuntimeError: fastdpo.patch('trl')",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
    )
    trainers = "fastdpo: trl.DPOTrainer, trl.OnlineDPOTrainer, trl.RewardTrainer (0.24.0): "
    assert run.stdout == f"{trainers}on when imported\n", run.stderr
    off = "off, trl cannot be imported: Failed to import: no mergekit [import-error]"
    assert f"PatchError: patch: {trainers}{off}" in run.stderr


ANY = "this version is not supported: install 'trl>=0.24,<1.17'"


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("ms-swift>=4", "this version is not supported: install 'ms-swift>=4.6,<4.7'"),
        ("trl<1.0,>=0.15", "this version is not supported, and other requires trl<1.0,>=0.15"),
        ("trl!=0.24.*,!=0.25.*,!=0.26.*,!=0.27.*,!=0.28.*", "this version is not supported: install 'trl>=0.29,<1.17'"),
        ("trl>=0.20", ANY),
        ("trl", ANY),
        ('trl==0.23.1; extra == "rl"', ANY),
        ("trl==1.8.0", ANY),  # not met as it is
        ("not a requirement", ANY),
    ],
)
def test_advice_respects_what_is_installed(tmp_path, monkeypatch, requirement, reason):
    package, version = ("swift", "4.5.0") if "swift" in requirement else ("trl", "0.23.1")
    distribution(tmp_path, DISTRIBUTIONS.get(package, package), version)
    distribution(tmp_path, "other", "0.1", requirement)
    monkeypatch.syspath_prepend(tmp_path)
    (seam,) = examine(f"{package}.DPOTrainer").seams
    assert (seam.version, seam.reason) == (version, reason)
