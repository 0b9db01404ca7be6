"""Tests that need a GPU: steps do not synchronize, and a CUDA graph can capture them."""

import pytest
import torch

from fastdpo.accuracy import error
from fastdpo.models.batch import are_as_copied, copies_of, raise_if_written
from fastdpo.ops import linear_logps, packed_attention, token_logps
from fastdpo.ops.head.passes import TileFormat
from tests.support.ops.heads import head_inputs

V, D = 5003, 64
ROWS = torch.tensor([[0, 0, 0, 70], [0, 50, 70, 33], [103, 0, 103, 40]], dtype=torch.int32, device="cpu")


@pytest.fixture(autouse=True)
def gpu(device, monkeypatch):
    if device != "cuda":
        pytest.skip("needs a GPU")
    monkeypatch.setattr("fastdpo.ops.head.logit_rows.KERNEL_TILE_BYTES", 256 * V * 2)
    monkeypatch.setattr("fastdpo.ops.head.logit_rows.FULL_TILE_ROWS", 256)
    assert TileFormat.of(torch.empty(V, D), torch.bfloat16).rows == 256


def head_leaves(n, trainable):
    inputs = head_inputs(n, V, D, torch.bfloat16)
    return inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_(trainable), inputs["targets"]


def heads(trainable, **options):
    """A forward and backward over 700 tokens in three tiles, and its tensors."""
    hidden, weight, targets = head_leaves(700, trainable)
    leaves = (hidden, weight) if trainable else (hidden,)

    def call():
        logps = linear_logps(hidden, weight, targets, **options).logps
        return logps.detach(), *torch.autograd.grad(logps.sum(), leaves)

    return call, (hidden, weight)


def logits():
    x = torch.randn(300, V).bfloat16().requires_grad_()
    targets = torch.randint(V, (300,))

    def call():
        logps = token_logps(x, targets).logps
        return logps.detach(), *torch.autograd.grad(logps.sum(), x)

    return call, (x,)


def attention():
    q, k, v = (torch.randn(143, h, 64).bfloat16().requires_grad_() for h in (4, 2, 2))

    def call():
        out = packed_attention(q, k, v, ROWS)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    return call, (q, k, v)


CALLS = {
    "frozen": lambda: heads(False),
    "kept": lambda: heads(True),
    "some kept": lambda: heads(True, memory_budget=256 * (V + 16) * 2),
    "recomputed": lambda: heads(True, memory_budget=0),
    "logits": logits,
    "attention": attention,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_step_synchronizes_with_the_device(name):
    call, _ = CALLS[name]()
    call()  # compiles kernels and caches the layout
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_unseen_writes_are_found_without_a_synchronization():
    x = torch.arange(8)
    copies = copies_of([x])
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert are_as_copied([x], copies)
        x.data.add_(1)
        assert are_as_copied([x], copies)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="a batch must not be written to"):
        raise_if_written(waits=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_graph_captures_forward_and_backward(name):
    call, tensors = CALLS[name]()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, call(), strict=True))


def test_other_rows_leave_the_layout_of_a_cuda_graph_alone():
    call, tensors = CALLS["attention"]()
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    q, k, v = tensors
    for prefix_length in range(1, 70):
        rows = ROWS.clone()
        rows[1, 1] = prefix_length
        packed_attention(q, k, v, rows)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("trainable", [False, True])
def test_compiled_with_inductor(trainable):
    torch.compiler.reset()
    compiled = torch.compile(linear_logps, fullgraph=True)
    hidden, weight, targets = head_leaves(300, trainable)
    leaves = (hidden, weight) if trainable else (hidden,)
    runs = []
    for op in (compiled, linear_logps):
        logps = op(hidden, weight, targets).logps
        runs.append([logps.detach(), *torch.autograd.grad(logps.sum(), leaves)])
    assert all(error(a, b) < 1e-6 for a, b in zip(*runs, strict=True))


def test_another_number_of_tokens_does_not_recompile():
    from fastdpo.kernels.token_logps import _token_logps_fwd_kernel

    def compiled():
        return sum(len(caches[0]) for caches in _token_logps_fwd_kernel.device_caches.values())

    weight = torch.randn(V, D).bfloat16()
    for n in (256, 17, 1):  # the last two are specialized differently: not a multiple of 16, and 1
        linear_logps(torch.randn(n, D).bfloat16(), weight, torch.randint(V, (n,)))
        if n == 256:
            before = compiled()
    assert compiled() == before > 0
