"""Newer versions of ms-swift next to versions of TRL that are tested, or not."""

import importlib.metadata

import pytest

from fastdpo.integrations.patching import examine


@pytest.mark.parametrize("trl", ["0.29.1", "0.30.0"])
def test_trainers_that_run_functions_of_TRL_need_a_tested_version_of_it(monkeypatch, trl):
    version = importlib.metadata.version
    versions = {"ms-swift": "4.7.0", "trl": trl}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or version(name))
    seams = {seam.name: seam for seam in examine("swift").seams}
    assert all(seams[f"swift.{kind}Trainer"].newer for kind in ("DPO", "KTO"))
    for kind in ("CPO", "ORPO"):
        seam = seams[f"swift.{kind}Trainer"]
        assert seam.on == (trl == "0.29.1")
        assert seam.on or "install 'trl>=0.28,<0.30'" in seam.reason
