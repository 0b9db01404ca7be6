"""The public ops on CPU tensors, through the kernels that CUDA tensors take, into memory full of NaN."""

import importlib

import pytest
import torch

from fastdpo.kernels import token_logps as kernels

ops = importlib.import_module("fastdpo.ops.token_logps")  # the module; its name in fastdpo.ops is the function's
ops._fwd.register_kernel("cpu")(ops._device_fwd)
ops._bwd.register_kernel("cpu")(ops._device_bwd)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """What no kernel wrote is NaN, or True."""

    def poisoned(allocate):
        def allocate_and_fill(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

        return allocate_and_fill

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Counts what reached the launchers: a test must not pass because the torch path answered."""
    counts = {"token_logps_fwd": 0, "token_logps_bwd": 0}

    def counting(name, launch):
        def count_and_launch(*args):
            counts[name] += 1
            return launch(*args)

        return count_and_launch

    for name in counts:
        monkeypatch.setattr(kernels, name, counting(name, getattr(kernels, name)))
    return counts
