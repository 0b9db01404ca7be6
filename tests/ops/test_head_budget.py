"""The default budget of kept gradient tiles and the size of a tile, by the memory of a device."""

import pytest
import torch

from fastdpo.ops import MEMORY_BUDGET, linear_logps
from fastdpo.ops.head.linear_logps import budget_for
from fastdpo.ops.head.logit_rows import kernel_tile_rows
from tests.support.ops.heads import head_inputs

HEAD = "fastdpo.ops.head.linear_logps"
GIB = 1 << 30
LLAMA, QWEN, GEMMA = 128_256, 151_936, 256_000  # vocabularies
N, V, D = 24, 64, 8
ROW = 4 * V  # bytes of a gradient tile in float32


@pytest.mark.parametrize("trained", [0, LLAMA * 4096])
def test_a_device_without_its_own_memory_keeps_512_mib(trained):
    assert budget_for(trained, None) == MEMORY_BUDGET == 512 << 20


@pytest.mark.parametrize("memory", [4 * GIB, 24 * GIB, 80 * GIB, 141 * GIB])
@pytest.mark.parametrize("trained", [0, QWEN * 896, LLAMA * 4096])
def test_a_gpu_keeps_a_share_of_its_memory_and_twice_the_gradient(memory, trained):
    budget = budget_for(trained, memory)
    assert budget >= max(512 << 20, memory // 16)
    assert budget >= 2 * trained * torch.float32.itemsize
    assert budget in (512 << 20, memory // 16, 8 * trained)


@pytest.mark.parametrize("memory", [80 * GIB, 141 * GIB])
@pytest.mark.parametrize("vocabulary", [LLAMA, QWEN, GEMMA])
def test_tiles_of_a_large_gpu_have_4096_rows(vocabulary, memory):
    assert kernel_tile_rows(vocabulary, torch.bfloat16, memory) == 4096


def test_tiles_of_a_small_gpu_take_a_part_of_its_memory():
    rows = kernel_tile_rows(QWEN, torch.bfloat16, 24 * GIB)
    assert rows % 256 == 0
    assert 24 * GIB / 32 - 256 * QWEN * 2 < rows * QWEN * 2 <= 24 * GIB / 32


@pytest.mark.parametrize("memory", [None, 2 * GIB, 141 * GIB])
@pytest.mark.parametrize("vocabulary", [1000, LLAMA])
def test_tiles_take_256_mib_wherever_there_is_memory(vocabulary, memory):
    rows = kernel_tile_rows(vocabulary, torch.bfloat16, memory)
    assert (rows + 256) * vocabulary * 2 > 256 << 20


@pytest.fixture
def gpu_memory(monkeypatch):
    """A function that sets the bytes of a GPU, for which CPU tensors stand in."""
    monkeypatch.setattr(f"{HEAD}.MEMORY_BUDGET", 0)
    return lambda size: monkeypatch.setattr(f"{HEAD}.memory_of", lambda device: size)


def kept_rows(inputs, **options):
    view = linear_logps(**inputs, **options).logps.grad_fn
    return len(view.next_functions[0][0].kept)


@pytest.mark.parametrize("trains_weight", [True, False])
def test_a_head_keeps_what_the_memory_of_its_device_allows(trains_weight, gpu_memory, rows_of_a_tile):
    rows_of_a_tile(4, V, torch.float32)
    gpu_memory(16 * 9 * ROW)
    inputs = head_inputs(N, V, D)
    inputs["weight"].requires_grad_(trains_weight)
    inputs["bias"] = torch.zeros(V, requires_grad=True)
    assert kept_rows(inputs) == (2 * D if trains_weight else 8)  # 9 rows fit, and tiles have 4


def test_a_budget_that_is_given_is_kept(gpu_memory, rows_of_a_tile):
    rows_of_a_tile(4, V, torch.float32)
    gpu_memory(GIB)
    inputs = head_inputs(N, V, D)
    inputs["weight"].requires_grad_()
    assert kept_rows(inputs, memory_budget=8 * ROW) == 8
    assert kept_rows(inputs) == N
