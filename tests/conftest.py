"""What every test runs under: one thread, and random numbers that are the same each time.

With `--device cuda` tensors are made on a GPU; with `--device interpreter`, and TRITON_INTERPRET=1, the kernels run on
tensors of the CPU. Both are for the tests of ops.
"""

import gc
from contextlib import nullcontext

import pytest
import torch

from fastdpo.ops import devices

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "interpreter", "cuda"), default="cpu", help="where ops run")


def pytest_collection_modifyitems(config, items):
    """The interpreter's arithmetic in bfloat16 is not that of any device."""
    if config.getoption("device") == "interpreter":
        params = {item: getattr(item, "callspec", None) for item in items}
        items[:] = [item for item in items if not params[item] or torch.bfloat16 not in params[item].params.values()]


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
