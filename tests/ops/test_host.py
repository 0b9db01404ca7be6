"""The host side of GPU paths, on meta tensors: no synchronization, and the expected launches."""

from contextlib import nullcontext

import pytest
import torch

from fastdpo import ops
from fastdpo.kernels import linear_logps as head_kernels
from fastdpo.kernels import token_logps as kernels
from fastdpo.ops import devices
from fastdpo.ops.head.linear_logps import linear_logps_bwd, linear_logps_fwd
from fastdpo.ops.head.results import STATISTICS
from fastdpo.ops.head.tile_format import TileFormat
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


def test_reading_a_value_of_a_meta_tensor_raises(launches):
    for ask in (lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], bool):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask(empty(1))


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
    grads = linear_logps_bwd._init_fn(*upstream, kept, jacobian, results[1:4], needs, None, *inputs, *options)
    assert [x.shape for x in grads[:2]] == [(N, D), (V, D) if needs[1] else (0,)]
    multiplied_again = steps if of_entropy is not None else steps - -(-keep // tiles.rows)
    assert len(launches["backward"]) == (0 if mode == "frozen" and of_entropy is None else multiplied_again)


def test_token_logps_does_not_synchronize(launches):
    logits, targets = empty(64, V, dtype=torch.bfloat16), empty(64, dtype=torch.long)
    results = token_logps_fwd._init_fn(logits, targets, *TRANSFORM, "")
    grad = token_logps_bwd._init_fn(empty(64), None, logits, targets, results[1:4], *TRANSFORM)
    assert grad.shape == logits.shape
    assert len(launches["forward"]) == len(launches["backward"]) == 1


def calls_of_each_op():
    """By name, the inputs of each op and a call of it with CPU tensors."""
    hidden, weight, logits = torch.randn(9, 24), torch.randn(67, 24), torch.randn(9, 67)
    targets, bounds = torch.randint(67, (9,)), torch.tensor([0, 4, 9])
    rows = torch.tensor([[0, 0, 0, 5], [0, 4, 5, 4]], dtype=torch.int32)
    pairs = targets[:8], torch.tensor([0, 2, 4, 5, 8]), torch.randn(2), torch.randn(2)
    query, key = torch.randn(9, 4, 8), torch.randn(9, 2, 8)
    head, every = (hidden, weight), dict(outputs=STATISTICS)
    return {
        "token_logps": (logits, lambda x: ops.token_logps(x, targets, **every).logps),
        "linear_logps": (head, lambda h, w: ops.linear_logps(h, w, targets, **every).logps),
        "frozen linear_logps": (hidden, lambda h: ops.linear_logps(h, weight, targets, softcap=5.0).logps),
        "sequence_logps": (logits, lambda x: ops.sequence_logps(x, targets, bounds).logps),
        "padded sequence_logps": (logits, lambda x: ops.sequence_logps(x[None], targets[None]).logps),
        "linear_sequence_logps": (head, lambda h, w: ops.linear_sequence_logps(h, w, targets, bounds).logps),
        "packed_attention": ((query, key), lambda q, k: ops.packed_attention(q, k, k, rows)),
        "windowed packed_attention": ((query, key), lambda q, k: ops.packed_attention(q, k, k, rows, window=2)),
        "capped packed_attention": ((query, key), lambda q, k: ops.packed_attention(q, k, k, rows, softcap=2.0)),
        "linear_preference_loss": (head, lambda h, w: ops.linear_preference_loss(h[:8], w, *pairs).loss),
        "preference_loss": (logits, lambda x: ops.preference_loss(*x[:4]).loss),
    }


with torch.device("cpu"):
    OP_NAMES = tuple(calls_of_each_op())


@pytest.mark.parametrize("name", OP_NAMES)
def test_ops_on_the_cpu_ignore_the_default_device(name):
    with torch.device("cpu"):
        leaves, call = calls_of_each_op()[name]
    leaves = leaves if isinstance(leaves, tuple) else (leaves,)
    found = []
    for default in ("cpu", "meta"):  # whose tensors have no values
        of_call = [x.clone().requires_grad_() for x in leaves]
        with torch.device(default):
            out = call(*of_call)
            out.sum().backward()
        found.append([out, *(x.grad for x in of_call)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
