"""`make test-next` prints what differs from the tested code."""

import importlib.util
import re
import shutil
from pathlib import Path

from tests.support import ROOT
from tests.support.copies import change, set_newer
from tests.support.documents import changed_code

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
    assert "tests.support.documents.changed_code $(NEXT)/tested" in makefile
    tests = re.search(r"NEXT_TESTS := (.*?)\n#", makefile, re.DOTALL)[1].replace("\\\n", " ").split()
    assert all((ROOT / test).exists() for test in tests)
    file, _, test = re.search(r"NOT_NEXT := (\S+)", makefile)[1].partition("::")
    assert file in tests
    assert f"def {test}(" in (ROOT / file).read_text()
