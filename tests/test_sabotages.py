"""The list of sabotages is complete, and fits the source. `make test-sabotages` applies them."""

import re

import pytest

from fastdpo.__main__ import parser, subparsers
from fastdpo.integrations.options import PatchOptions
from tests.support import ROOT
from tests.support.sabotages import sabotages

TRAINERS = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def promises() -> set[str]:
    return {
        f"promise {number}" for number in re.findall(r"^### (\d)\. ", (ROOT / "docs" / "design.md").read_text(), re.M)
    }


def trainers() -> set[str]:
    table = TRAINERS.partition("<!-- trainers:begin -->")[2].partition("<!-- trainers:end -->")[0]
    rows = (re.findall(r"`(\w+)`", line) for line in table.splitlines())
    return {f"{package}.{trainer}" for package, *names in filter(None, rows) for trainer in names}


def commands() -> set[str]:
    return {f"fastdpo {name}" for name in subparsers(parser())}


def test_each_promise_and_each_capability_has_an_entry():
    assert len(promises()) == 5
    assert len(trainers()) >= 15
    assert len(commands()) == 3
    listed = promises() | trainers() | commands() | {*PatchOptions._fields}
    assert listed <= {sabotage.name for sabotage in sabotages()}


@pytest.mark.parametrize("sabotage", sabotages(), ids=lambda sabotage: sabotage.name)
def test_an_entry_fits_the_source(sabotage):
    source = (ROOT / sabotage.file).read_text()
    assert source.count(sabotage.old) == 1
    changed = source.replace(sabotage.old, sabotage.new)
    assert compile(changed, sabotage.file, "exec")
    assert changed != source
    assert (ROOT / sabotage.tests.split()[0]).exists()
    assert re.search(rf"^{re.escape(sabotage.target)}\b.*:", MAKEFILE, re.M) or sabotage.target.startswith("test-trl-")
