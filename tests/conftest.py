"""Settings of all tests: one thread, and the same random numbers each time.

`--quick` leaves out combinations: each test runs with every value of each of its parameters at least once.

With `--device cuda` tensors are made on a GPU; with `--device interpreter`, and TRITON_INTERPRET=1, the kernels run on
tensors of the CPU. Both are for the tests of ops.
"""

import gc
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from selection import each_value_once

from fastdpo.ops import devices

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "interpreter", "cuda"), default="cpu", help="where ops run")
    parser.addoption("--quick", action="store_true", help="run every value of each parameter, not every combination")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    """Leaves out what the interpreter cannot run, and combinations where `--quick` is given.

    The interpreter's arithmetic in bfloat16 is not that of any device.
    """
    if config.getoption("device") == "interpreter":
        items[:] = [item for item in items if torch.bfloat16 not in _parameters(item).values()]
    if config.getoption("quick"):
        tests = defaultdict(list)
        for item in items:
            tests[item.nodeid.split("[")[0]].append(item)
        chosen = {cases[i] for cases in tests.values() for i in each_value_once([*map(_parameters, cases)])}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def _parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {"": ""}


@pytest.fixture(autouse=True, scope="module")
def _imports_are_permanent():
    """Excludes what is imported from garbage collection, which every training asks for: most of its time went there."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    gc.unfreeze()


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    kind = request.config.getoption("device")
    if kind == "interpreter":
        monkeypatch.setattr(devices, "TRITON_DEVICES", ("cpu",))
    with torch.device("cuda") if kind == "cuda" else nullcontext():
        yield kind


@pytest.fixture(autouse=True)
def seed(device):
    torch.manual_seed(0)
