"""Settings of all tests: one thread, the same random seed for each test, and no patch that outlives its test.

`--quick` leaves out the tests that are marked as `thorough`, and combinations of parameters: each of
the other tests still runs at least once with every value of each of its parameters.

A test starts a process of its own for what depends on the state of one: kernels in Triton's interpreter,
which Triton chooses when it is imported; another version of TRL; programs; and several ranks. All other
tests can share a process, in any order.

The tests of ops also run with `--device cuda`, which creates tensors on a GPU, with `--device cpu`,
under which a default device is set as well, and with `--device interpreter` and TRITON_INTERPRET=1, which
interprets the kernels on CPU tensors.
"""

import functools
import gc
import importlib.metadata
import os
import sys
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fastdpo
from fastdpo.ops import second_derivatives
from fastdpo.ops.attention import routes
from tests.support.documents import trained
from tests.support.selection import each_value_once

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "interpreter", "cuda"), help="where ops run; cpu if not given")
    parser.addoption(
        "--measure", metavar="DIRECTORY", help="train larger models in real programs, and write times here"
    )
    parser.addoption("--rounds", type=int, default=3, help="how often `--measure` repeats each training")
    parser.addoption("--shard", metavar="I/N", default="0/1", help="run every N-th test, from the I-th on")
    parser.addoption("--quick", action="store_true", help="every value of each parameter once, nothing thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports and collects without garbage collection, which took a third of the time and found little."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    """Deselects combinations of parameters with `--quick`, and the tests of other shards."""
    if config.getoption("quick"):
        tests = defaultdict(list)
        for item in items:
            if item.get_closest_marker("thorough") is None:
                tests[item.nodeid.split("[")[0]].append(item)
        chosen = {cases[i] for cases in tests.values() for i in each_value_once([*map(_parameters, cases)])}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    shard, shards = map(int, config.getoption("shard").split("/"))
    items[:] = items[shard::shards]


def _parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {"": ""}


@pytest.fixture(autouse=True, scope="module")
def _imports_are_permanent():
    """Excludes imported objects from garbage collection.

    Every training collects garbage, and traversing these objects took most of its time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_done_for_a_gpu(pytestconfig):
    """Without a GPU, what torch and accelerate do for one takes time in each training, and has no effect.

    accelerate collects garbage to empty its cache. torch formats the stack of each call that sets a seed.
    """
    with ExitStack() as stack:
        if pytestconfig.getoption("device") != "cuda":
            for accelerator in (torch.cuda, torch.xpu, torch.mtia):
                stack.enter_context(mock.patch.object(accelerator, "manual_seed_all"))
            if "accelerate.utils.memory" in sys.modules:
                stack.enter_context(mock.patch.object(sys.modules["accelerate.utils.memory"], "clear_device_cache"))
        yield


@pytest.fixture(autouse=True, scope="module")
def _metadata_is_read_once():
    """Trainers ask accelerate in each step whether PEFT is installed, and it parses the metadata of PEFT anew."""
    with mock.patch.object(importlib.metadata, "metadata", functools.cache(importlib.metadata.metadata)):
        yield


@pytest.fixture(autouse=True, scope="module")
def _datasets_have_random_fingerprints():
    """`datasets` hashes each function that it maps over rows, to find an earlier result: a tenth of a training."""
    with ExitStack() as stack:
        for name in ("datasets.arrow_dataset", "datasets.fingerprint"):
            if name in sys.modules:
                stack.enter_context(mock.patch.object(sys.modules[name], "update_fingerprint", _random_fingerprint))
        yield


def _random_fingerprint(*_) -> str:
    """As of a function that `datasets` cannot hash."""
    return sys.modules["datasets.fingerprint"].generate_random_fingerprint()


def pytest_sessionfinish(session):
    gc.unfreeze()
    if "FASTDPO_TRAINED" in os.environ:
        trained.write(Path(os.environ["FASTDPO_TRAINED"]))


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    given = request.config.getoption("device")
    if given == "interpreter":
        from tests.support.kernels import interpreted

        monkeypatch.setenv("FASTDPO_STRICT", "1")  # a kernel that fails is an error, not replaced
        interpreted.install(monkeypatch)
    with torch.device(given) if given in ("cpu", "cuda") else nullcontext():
        yield given or "cpu"


@pytest.fixture(autouse=True)
def _no_patch_is_left(monkeypatch):
    """Ends before `monkeypatch`, which undoes what patches were made of."""
    yield
    if "fastdpo.integrations.patching" in sys.modules:
        fastdpo.unpatch()


@pytest.fixture
def both(tmp_path):
    """Trains TRL's DPOTrainer, stock and patched, from the same weights."""
    from tests.support.trl.dpo import train_both

    return functools.partial(train_both, tmp_path)


@pytest.fixture
def mesh():
    """Of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def new_plans():
    """Attention is planned anew: tests replace what plans are made of."""
    routes.forget()


@pytest.fixture(autouse=True)
def _no_gradient_was_differentiated_again():
    """A process in which one was decides nothing from then on."""
    second_derivatives.uses.clear()


@pytest.fixture(autouse=True)
def seed(device):
    torch.manual_seed(0)
