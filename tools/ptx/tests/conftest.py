"""Runs ops with kernels that are compiled for NVIDIA architectures and executed on the CPU."""

import pytest
import torch

from fastdpo.ops.attention import routes
from tools.ptx import ops

torch.set_num_threads(1)


@pytest.fixture(params=["sm80", "sm90"])
def architecture(request):
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    routes.forget()


@pytest.fixture(autouse=True)
def _faults_are_raised(monkeypatch):
    """A backend that is not named is replaced by another when it fails."""
    monkeypatch.setenv("FASTDPO_ATTENTION", "triton")


@pytest.fixture
def launches(architecture, monkeypatch):
    """The names of the kernels that were launched."""
    return ops.install(monkeypatch, architecture).launches
