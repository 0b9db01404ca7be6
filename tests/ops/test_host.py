"""The host side of GPU paths, on meta tensors: no synchronization, and the expected launches."""

from contextlib import nullcontext

import pytest
import torch

from fastdpo import ops
from fastdpo.kernels import linear_logps as head_kernels
from fastdpo.kernels import token_logps as kernels
from fastdpo.ops import devices
from fastdpo.ops.head.linear_logps import linear_logps_bwd, linear_logps_fwd
from fastdpo.ops.head.passes import TileFormat
from fastdpo.ops.head.results import STATISTICS
from fastdpo.ops.head.token_logps import token_logps_bwd, token_logps_fwd

N, V, D = 4096, 151_936, 64
TRANSFORM = (30.0, 1.0, 1.0)


class Recorder:
    """Replaces a kernel and records the grids of its launches."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.grids.append(grid)


@pytest.fixture
def launches(monkeypatch):
    """The grids on which each kernel was launched, for meta tensors, whose values cannot be read."""
    monkeypatch.setattr(devices, "TRITON_DEVICES", ("meta",))
    monkeypatch.setattr(torch.cuda, "device_of", nullcontext)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    recorders = {}
    places = {"forward": (kernels, "_token_logps_fwd_kernel"), "backward": (kernels, "_token_logps_bwd_kernel")}
    places["targets"] = (head_kernels, "_target_logits_kernel")
    for name, place in places.items():
        recorders[name] = Recorder()
        monkeypatch.setattr(*place, recorders[name])
    return {name: recorder.grids for name, recorder in recorders.items()}


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def head_arguments():
    hidden, weight = empty(N, D, dtype=torch.bfloat16), empty(V, D, dtype=torch.bfloat16)
    return hidden, weight, None, empty(N, dtype=torch.long)


def test_gpus_run_kernels_if_triton_is_installed():
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert all(devices.suits_triton(gpu, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    assert not devices.suits_triton(gpu, torch.float64)
    assert not devices.suits_triton(cpu, torch.float32)


@pytest.mark.parametrize("statistics", ["", ",".join(STATISTICS)])
@pytest.mark.parametrize("mode", ["nothing", "frozen", "kept", "recomputed"])
def test_a_head_does_not_synchronize(mode, statistics, launches):
    tiles = TileFormat.of(empty(V, D), torch.bfloat16)
    keep = {"kept": N, "recomputed": tiles.rows_within(N, ops.MEMORY_BUDGET)}.get(mode, 0)
    inputs, options = head_arguments(), (*TRANSFORM, torch.bfloat16)
    kept, jacobian, *results = linear_logps_fwd._init_fn(statistics, keep, mode == "frozen", *inputs, *options)
    steps = -(-N // tiles.rows)
    assert len(launches["forward"]) == len(launches["targets"]) == steps > 1
    assert sum(rows for (rows,) in launches["forward"]) == N
    if mode == "nothing":
        return
    of_entropy = empty(N) if statistics and mode != "kept" else None
    needs = [True, mode != "frozen", False]
    upstream = empty(N), of_entropy
    grads = linear_logps_bwd._init_fn(*upstream, kept, jacobian, results[1:4], needs, *inputs, *options)
    assert [x.shape for x in grads[:2]] == [(N, D), (V, D) if needs[1] else (0,)]
    multiplied_again = steps if of_entropy is not None else steps - -(-keep // tiles.rows)
    assert len(launches["backward"]) == (0 if mode == "frozen" and of_entropy is None else multiplied_again)


def test_token_logps_does_not_synchronize(launches):
    logits, targets = empty(64, V, dtype=torch.bfloat16), empty(64, dtype=torch.long)
    results = token_logps_fwd._init_fn(logits, targets, *TRANSFORM, "")
    grad = token_logps_bwd._init_fn(empty(64), None, logits, targets, results[1:4], *TRANSFORM)
    assert grad.shape == logits.shape
    assert len(launches["forward"]) == len(launches["backward"]) == 1
