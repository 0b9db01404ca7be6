"""The host side of attention on GPUs, without a GPU: the choice of a backend, and launches."""

import math
from collections import Counter
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from fastdpo.kernels import attention_blocks, gather_keys, packed_attention, packed_attention_backward
from fastdpo.ops.attention import routes
from fastdpo.ops.attention.device_layout import AttentionOptions, DeviceLayout, Kind, rows_of
from fastdpo.ops.attention.flash import varlen_layout
from fastdpo.ops.attention.triton_backend import LEAST_TURNS, MOST_PARTS, layout_blocks

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ROWS = torch.tensor([[0, 0, 0, 9], [0, 5, 9, 4]], dtype=torch.int32, device="cpu")
OPTIONS = AttentionOptions(1.0, None, None)


def gpu_inputs(dtype):
    """query and value on a GPU, without memory."""
    with FakeTensorMode():
        return torch.empty(13, 4, 16, dtype=dtype, device=GPU), torch.empty(13, 2, 16, dtype=dtype, device=GPU)


def call_on_gpu(dtype):
    """The arguments of `routes.chosen`."""
    example = gpu_inputs(dtype)
    return Kind.of(*example, OPTIONS), rows_of(ROWS, 13), example


def test_float32_on_a_gpu_runs_in_pieces_with_a_logged_reason(monkeypatch, caplog):
    """But not that of a probed model: one with float32 weights is trained under autocast, and probed without."""
    routes.forget()
    monkeypatch.delenv(routes.VARIABLE, raising=False)
    arguments = call_on_gpu(torch.float32)
    with routes.trial():
        assert routes.chosen(*arguments) is None
    assert not caplog.text
    for _ in range(2):
        assert routes.chosen(*arguments) is None
    assert caplog.text.count("triton: it needs float16 or bfloat16; got torch.float32") == 1


def test_triton_takes_16_bits_on_a_gpu_and_float32_only_in_the_interpreter(monkeypatch):
    triton = routes.BACKENDS["triton"]
    for dtype in (torch.float16, torch.bfloat16):
        assert triton.unsupported_reason(call_on_gpu(dtype)[0]) is None
    monkeypatch.setattr("fastdpo.ops.devices.TRITON_DEVICES", ("cpu",))
    query = torch.empty(13, 4, 16, device="cpu")
    assert triton.unsupported_reason(Kind.of(query, query, OPTIONS)) is None


def test_a_selected_triton_refuses_float32(monkeypatch):
    monkeypatch.setenv(routes.VARIABLE, "triton")
    with pytest.raises(NotImplementedError, match=r"got triton: it needs float16 or bfloat16; got torch\.float32"):
        routes.chosen(*call_on_gpu(torch.float32))


def test_every_launch_sets_the_fusion_of_products_and_sums(monkeypatch):
    """Its default differs between versions of Triton."""
    launches = {}

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **options: launches.update({self.name: options})

    monkeypatch.setattr(torch.cuda, "device_of", nullcontext)
    names = {
        module: [name for name in vars(module) if name.endswith("_kernel")]
        for module in (gather_keys, packed_attention, packed_attention_backward)
    }
    for module, kernels in names.items():
        for name in kernels:
            monkeypatch.setattr(module, name, Recorder(name))
    rows = rows_of(ROWS, 13)
    varlen = DeviceLayout(varlen_layout(rows), CPU).contents
    configs = attention_blocks.kernel_configs(16, 16, None)
    query, key = torch.empty(13, 4, 16, device="meta"), torch.empty(13, 2, 16, device="meta")
    blocks = layout_blocks(rows, 4, 2, None, configs)
    out, lse = packed_attention.packed_attention_fwd(query, key, key, blocks, configs.forward, None, *OPTIONS)
    packed_attention_backward.packed_attention_bwd(out, query, key, key, out, lse, blocks, configs, *OPTIONS)
    placed = gather_keys.gather_keys_fwd(key, key, varlen.places.index)
    gather_keys.gather_keys_bwd(*placed, varlen.places.readers, varlen.places.first_reader)
    assert launches.keys() == {name for kernels in names.values() for name in kernels}
    assert all(options.get("enable_fp_fusion") is True for options in launches.values())


def rows_of_pairs(pairs, header, prompt, completion):
    """Pairs behind a header that all of them share."""
    rows = [(0, 0, 0, header)] * (header > 0)
    for _ in range(pairs):
        start = sum(rows[-1][2:]) if rows else 0
        rows.append((0, header, start, prompt))
        before = start + prompt - (header + prompt)
        rows += [(before, header + prompt, start + prompt + skipped, completion) for skipped in (0, completion)]
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("pairs", "header"), [(2, 0), (16, 0), (8, 200), (20, 200), (20, 64)])
def test_programs_of_keys_share_the_readers_of_a_header(pairs, header, window):
    """Every block of queries that sees keys is read once; no program is much longer than the mean of 256."""
    rows, key_heads = rows_of_pairs(pairs, header, 312, 301), 8
    tokens = int(rows[-1, 2:].sum())
    blocks = layout_blocks(rows_of(rows, tokens), 32, key_heads, window, attention_blocks.kernel_configs(128, 128, 9))
    rows, pieces = rows.tolist(), blocks.pieces.tolist()

    def turns(row, first, reader):
        """Blocks of 64 queries of a reader of which one sees a key of a block of 64."""
        (_, _, own, own_length), (reading, start, length, position) = rows[row], pieces[reader]
        keys = range(max(own + first, start), min(own + min(first + 64, own_length), start + length))
        before, queries = rows[reading][1], rows[reading][3]
        begin = max(keys.start - start + position - before, 0)
        end = min(queries, keys.stop - 1 - start + position - before + (window or tokens))
        return math.ceil(max(end - begin, 0) / 64) if keys else 0

    readers = blocks.readers.tolist()
    programs = [[(row, first, x) for x in readers[begin:end]] for row, first, begin, end, _ in blocks.keys.tolist()]
    everything = product(range(len(rows)), range(0, 312, 64), range(len(pieces)))
    read = Counter({x: n for program in programs for x in program if (n := turns(*x))})
    expected = {x: turns(*x) for x in everything if x[1] < rows[x[0]][3]}
    assert read == {x: n for x, n in expected.items() if n}
    assert len(read) == sum(turns(*x) > 0 for program in programs for x in program)  # nothing twice
    longest, mean = max(sum(turns(*x) for x in program) for program in programs), read.total() * key_heads / 256
    assert longest <= max(mean, 2 * LEAST_TURNS / 4) + 5  # a reader has 5 at most
    assert (len(blocks.parts.tokens) > 1) == (header > 0)
    assert len(blocks.parts.places) * key_heads <= MOST_PARTS * 64 + key_heads
