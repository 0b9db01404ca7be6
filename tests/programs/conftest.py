"""The tests of real programs. Each folder is collected where its program is installed."""

import functools
import json
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.support.programs import harness
from tests.support.programs.workload import MEASURED, TINY, Workload

PROGRAMS = {"axolotl": "axolotl", "llamafactory": "llamafactory", "swift": "ms-swift"}
"""The distributions of the programs, by folder."""

_installed = {distribution.name.lower() for distribution in distributions()}
collect_ignore = [folder for folder, name in PROGRAMS.items() if name not in _installed]


def pytest_collection_modifyitems(config, items):
    """With `--measure`, only the trainings that make a row of the table are run."""
    if config.getoption("measure"):
        items[:] = [item for item in items if "record" in item.fixturenames]


@pytest.fixture
def workload(request) -> Workload:
    """The sizes of a training: tiny ones, or with `--measure` those of the table of programs."""
    return MEASURED if request.config.getoption("measure") else TINY


@pytest.fixture
def train_both(request, tmp_path):
    """`harness.run_both` in this test's directory. Trainings that are measured use two threads."""
    measured = request.config.getoption("measure") is not None
    options = {"threads": 2, "rounds": request.config.getoption("rounds")} if measured else {}
    return functools.partial(harness.run_both, directory=tmp_path, **options)


@pytest.fixture
def record(request):
    """Writes a row of the table of programs, with `--measure`. Takes the arguments of `harness.row`."""

    def write(program: str, distribution: str, command: str, stock: harness.Run, fused: harness.Run) -> None:
        directory = request.config.getoption("measure")
        if directory is not None:
            name = request.node.name.replace("/", "-")
            row = harness.row(program, distribution, command, stock, fused)
            row["rounds"] = request.config.getoption("rounds")
            Path(directory).mkdir(parents=True, exist_ok=True)
            (Path(directory) / f"{program}-{row['trl']}-{name}.json").write_text(json.dumps(row, indent=2) + "\n")

    return write
