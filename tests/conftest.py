"""What every test runs under: one thread, and random numbers that are the same each time."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
