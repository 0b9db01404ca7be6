"""A plugin of pytest that runs tests of the ops with kernels compiled for an NVIDIA architecture.

python -m pytest -p tools.ptx.plugin [--target sm80] tests/ops/test_token_logps.py
"""

import pytest

from tools.ptx import ops


def pytest_addoption(parser):
    parser.addoption("--target", default="sm90", metavar="ARCHITECTURE", help="what kernels are compiled for")


@pytest.fixture(autouse=True)
def compiled_kernels(request, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")  # a kernel that fails is an error, not replaced
    ops.install(monkeypatch, request.config.getoption("target"))
