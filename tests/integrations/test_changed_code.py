"""`make test-newest` prints what differs from the tested code."""

import json
import re

from packaging.version import Version

from fastdpo.integrations.admission import packages
from tests.support import ROOT
from tests.support.documents import newest


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
