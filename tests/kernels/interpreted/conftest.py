"""Runs the public ops on CPU tensors through the Triton kernels.

Memory that no kernel writes holds NaN. Accesses and the arithmetic of integers are checked,
and bfloat16 is as on a GPU.
"""

import pytest

from fastdpo.kernels import token_logps as kernels
from tests.support.kernels import interpreted
from tests.support.workers.processes import PROCESSES

PROCESSES.set_forkserver_preload(["torch"])  # ranks import no trainer


@pytest.fixture(autouse=True)
def kernels_for_the_cpu(monkeypatch):
    interpreted.install(monkeypatch)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Counts calls of the launchers: a test must not pass because the torch path ran instead."""
    counts = {"token_logps_fwd": 0, "token_logps_bwd": 0}

    def counting(name, launch):
        def count_and_launch(*args, **kwargs):
            counts[name] += 1
            return launch(*args, **kwargs)

        return count_and_launch

    for name in counts:
        monkeypatch.setattr(kernels, name, counting(name, getattr(kernels, name)))
    return counts
