"""Runs ops with kernels that are compiled for NVIDIA architectures and executed on the CPU."""

import executed_kernels
import pytest


@pytest.fixture(params=["sm80", "sm90"])
def architecture(request):
    return request.param


@pytest.fixture
def launches(architecture, monkeypatch):
    """The names of the kernels that were launched."""
    return executed_kernels.install(monkeypatch, architecture).launches
