"""Runs ops with kernels that are compiled for NVIDIA architectures and executed on the CPU."""

import pytest

from tests.support.kernels import executed


@pytest.fixture(params=["sm80", "sm90"])
def architecture(request):
    return request.param


@pytest.fixture(autouse=True)
def _faults_are_raised(monkeypatch):
    """A backend that is not named is replaced by another when it fails."""
    monkeypatch.setenv("FASTDPO_ATTENTION", "triton")


@pytest.fixture
def launches(architecture, monkeypatch):
    """The names of the kernels that were launched."""
    return executed.install(monkeypatch, architecture).launches
