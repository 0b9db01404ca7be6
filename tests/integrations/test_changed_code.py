"""`make test-newest` prints what differs from the tested code."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

from packaging.version import Version

from fastdpo.integrations.admission import packages
from tests.support import ROOT
from tests.support.copies import change, set_newer
from tests.support.documents import changed_code, newest

NAME = "trl.experimental.cpo.cpo_trainer.CPOTrainer.get_batch_logps"


def test_a_changed_function_is_printed_with_a_diff(monkeypatch, capsys, tmp_path):
    package = Path(importlib.util.find_spec("trl").submodule_search_locations[0])
    file = tmp_path / "trl" / "experimental" / "cpo" / "cpo_trainer.py"
    file.parent.mkdir(parents=True)
    shutil.copy(package / file.relative_to(tmp_path / "trl"), file)
    file.write_text(file.read_text().replace("loss_mask = labels !=", "loss_mask = labels ==  "))
    set_newer(monkeypatch, "trl")
    change(monkeypatch, NAME)
    changed_code.main(tmp_path)
    printed = capsys.readouterr().out
    assert f"\n{NAME}: differs\n--- tested\n+++ installed\n" in printed
    changes = [line for line in printed.splitlines() if re.match(r"[-+] ", line)]
    assert [line.split()[:5] for line in changes] == [
        ["-", "loss_mask", "=", "labels", "=="],
        ["+", "loss_mask", "=", "labels", "!="],
    ]
    assert printed.endswith("\n1 functions differ from the tested ones\n")


def test_nothing_differs_in_the_tested_versions(capsys):
    changed_code.main(None)
    assert capsys.readouterr().out.endswith("\n\n0 functions differ from the tested ones\n")


def test_the_target_compares_with_the_pinned_versions():
    makefile = (ROOT / "Makefile").read_text()
    assert "tests.support.documents.changed_code $(NEWEST)/tested" in makefile
    for left_out in re.search(r"NOT_NEWEST := (.*?)\ntest-newest", makefile, re.DOTALL)[1].replace("\\\n", " ").split():
        file, _, test = left_out.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints" / "pins.txt").read_text().splitlines()
    torch = re.search(r"^TORCH \?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    return {**dict(line.split("==") for line in lines if "==" in line), "torch": torch}


def test_the_versions_of_a_run_are_written_and_tested():
    """The newest version of each package is that of the pins or of the last `make test-newest`."""
    recorded = json.loads(newest.PATH.read_text())
    assert recorded.keys() == {"tests", *newest.PACKAGES}
    assert newest.sentence() in (ROOT / "docs" / "support.md").read_text()
    for package, tested in packages.TESTED.items():
        pinned = pins()[package]
        assert Version(tested) == max(Version(Version(x).public) for x in (pinned, recorded[package]))
