"""Other versions of torch, transformers, accelerate and PEFT than the tested ones: newer ones, and names taken away."""

import importlib
import importlib.metadata
import re
import sys

import pytest

import fastdpo
from fastdpo.commands import doctor
from fastdpo.integrations import patching
from fastdpo.integrations.admission import packages
from fastdpo.integrations.patching import examine
from tests.support.copies import set_newer
from tests.support.trl.dpo import assert_same_bits, tiny_model, train

NAMES = [(module.partition(".")[0], module, name) for module, names in packages.NAMES.items() for name in names]


def take_away(monkeypatch, module, name):
    *owners, last = name.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    for kind in [owner, *(x for x in kinds if x is not owner)]:
        if last in vars(kind):
            monkeypatch.delattr(kind, last)


@pytest.mark.parametrize(("package", "module", "name"), NAMES)
def test_a_name_that_is_missing_is_a_reason(monkeypatch, package, module, name):
    take_away(monkeypatch, module, name)
    report = examine()
    assert {seam.reason.name for seam in report.seams} == {"missing-name"}
    version = importlib.metadata.version(package)
    reason = str(report.seams[0].reason)  # the first name that is missing: two classes may have one from a third
    assert re.fullmatch(rf"{package} {re.escape(version)} does not have \S+, on which fastdpo relies", reason)
    assert name.rpartition(".")[2] in reason
    with pytest.raises(fastdpo.PatchError, match=re.escape("[missing-name]")):
        fastdpo.patch("trl.DPOTrainer")
    if package in doctor.OPTIONAL:
        finding = next(x for x in doctor.package_findings() if x.name == package)
        assert finding.status == doctor.OFF
        assert reason in finding.detail


@pytest.mark.parametrize("taken", ["AttentionInterface", "AttentionMaskInterface"])
def test_a_name_that_goes_missing_later_leaves_the_model_to_stock(monkeypatch, caplog, tmp_path, taken):
    def run(name):
        return train(tmp_path / name, tiny_model(seed=0), tiny_model(seed=1), evaluate=6)

    stock = run("stock")
    fastdpo.patch("trl.DPOTrainer")
    monkeypatch.setattr(sys.modules["transformers"], taken, None)  # another object since PEFT was imported
    patched = run("patched")
    assert {path for _, path in patched.calls} == {"stock"}
    assert "packed attention cannot be installed in LlamaForCausalLM: " in caplog.text
    assert_same_bits(stock, patched)


@pytest.mark.parametrize("package", packages.TESTED)
def test_a_newer_version_is_provisional(monkeypatch, package):
    """The report of a patch says so, as the doctor does."""
    monkeypatch.setattr(patching, "noted", set())
    set_newer(monkeypatch, package)
    report = fastdpo.patch("trl.DPOTrainer")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(packages.newer()))
    assert f"{package} 99.0" in versions
    assert report.seams[0].newer == tuple(versions.split(", "))
    nothing = "Nothing is to be done: calls of each model are compared with stock ones"
    assert report.note == f"provisionally, newer than tested: {versions}. {nothing}"
    tested = packages.TESTED[package]
    assert packages.description(package) == f"provisionally, newer than the tested version, {tested}"
