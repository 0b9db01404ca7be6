"""`make test-next` prints what differs from the tested code."""

import importlib.util
import re
import shutil
from pathlib import Path

from fastdpo.integrations.admission import evidence
from tests.support import ROOT
from tests.support.documents import changed_code

NAME = "trl.trainer.utils.add_fused_lm_head"


def test_a_changed_function_is_printed_with_a_diff(monkeypatch, capsys, tmp_path):
    package = Path(importlib.util.find_spec("trl").submodule_search_locations[0])
    utils = tmp_path / "trl" / "trainer" / "utils.py"
    utils.parent.mkdir(parents=True)
    shutil.copy(package / "trainer" / "utils.py", utils)
    utils.write_text(utils.read_text().replace("loss = -log_probs.sum() /", "loss = -2 * log_probs.sum() /"))
    tested = {name: [] if name == NAME else x for name, x in evidence.tested().items()}
    monkeypatch.setattr(evidence, "tested", lambda: tested)
    changed_code.main(tmp_path)
    printed = capsys.readouterr().out
    assert f"\n{NAME}: differs\n--- tested\n+++ installed\n" in printed
    changes = [line for line in printed.splitlines() if re.match(r"[-+] ", line)]
    assert [re.sub(r" / .*", "", line).split() for line in changes] == [
        ["-", "loss", "=", "-2", "*", "log_probs.sum()"],
        ["+", "loss", "=", "-log_probs.sum()"],
    ]
    assert printed.endswith("\n1 functions and constants differ from the tested ones\n")


def test_nothing_differs_in_the_tested_versions(capsys):
    changed_code.main(None)
    assert capsys.readouterr().out == "\n0 functions and constants differ from the tested ones\n"


def test_the_source_of_constants_and_methods_is_found():
    package = Path(importlib.util.find_spec("trl").submodule_search_locations[0]).parent
    assert changed_code.source_in(package, "trl.kernels.chunked_logprob._BLOCK_SIZE") == "_BLOCK_SIZE = 1024"
    method = changed_code.source_in(package, "trl.kernels.chunked_logprob.ChunkedLogProbFunction.forward")
    assert method.startswith("@staticmethod\ndef forward(")
    assert changed_code.source_in(package, "trl.nothing.here") is None


def test_the_target_compares_with_the_pinned_versions():
    makefile = (ROOT / "Makefile").read_text()
    assert "tests.support.documents.changed_code $(NEXT)/tested" in makefile
    tests = re.search(r"NEXT_TESTS := (.*?)\n#", makefile, re.DOTALL)[1].replace("\\\n", " ").split()
    assert all((ROOT / test).exists() for test in tests)
    file, _, test = re.search(r"NOT_NEXT := (\S+)", makefile)[1].partition("::")
    assert file in tests
    assert f"def {test}(" in (ROOT / file).read_text()
