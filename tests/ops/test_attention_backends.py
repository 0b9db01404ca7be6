"""The host side of attention on GPUs, without a GPU: the choice of a backend, and launches."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastdpo import attention
from fastdpo.ops.attention import backends
from fastdpo.ops.attention.calls import AttentionOptions
from fastdpo.ops.attention.layouts import layout_blocks, varlen_layout

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ROWS = torch.tensor([[0, 0, 0, 9], [0, 5, 9, 4]], dtype=torch.int32, device="cpu")
OPTIONS = AttentionOptions(1.0, None, None)


def gpu_inputs(dtype):
    """query and value on a GPU, without memory."""
    with FakeTensorMode():
        return torch.empty(13, 4, 16, dtype=dtype, device=GPU), torch.empty(13, 2, 16, dtype=dtype, device=GPU)


def test_float32_on_a_gpu_runs_in_pieces_with_a_logged_reason(monkeypatch, caplog):
    pytest.importorskip("triton")
    backends.forget()
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    query, value = gpu_inputs(torch.float32)
    for _ in range(2):
        assert backends.chosen(query, value, ROWS, OPTIONS) is None
    assert caplog.text.count("triton: it needs float16 or bfloat16; got torch.float32") == 1


def test_the_float32_of_a_probed_model_is_not_logged(monkeypatch, caplog):
    """A model with float32 weights is trained under autocast, but probed without."""
    pytest.importorskip("triton")
    backends.forget()
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    arguments = *gpu_inputs(torch.float32), ROWS, OPTIONS
    with attention.witness():
        assert backends.chosen(*arguments) is None
    assert not caplog.text
    assert backends.chosen(*arguments) is None
    assert "it needs float16 or bfloat16" in caplog.text


def test_triton_takes_16_bits_on_a_gpu_and_float32_only_in_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    triton = backends.BACKENDS["triton"]
    for dtype in (torch.float16, torch.bfloat16):
        assert triton.unsupported_reason(*gpu_inputs(dtype), OPTIONS) is None
    monkeypatch.setattr("fastdpo.ops.devices.TRITON_DEVICES", ("cpu",))
    query = torch.empty(13, 4, 16, device="cpu")
    assert triton.unsupported_reason(query, query, OPTIONS) is None


def test_a_selected_triton_refuses_float32(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv(backends.VARIABLE, "triton")
    with pytest.raises(NotImplementedError, match=r"got triton: it needs float16 or bfloat16; got torch\.float32"):
        backends.chosen(*gpu_inputs(torch.float32), ROWS, OPTIONS)


def test_every_launch_sets_the_fusion_of_products_and_sums(monkeypatch):
    """Its default differs between versions of Triton."""
    pytest.importorskip("triton")
    from fastdpo.kernels import attention_blocks, gather_keys, packed_attention, packed_attention_backward

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
    blocks = layout_blocks(ROWS, 13, 64, 64, CPU)
    varlen = varlen_layout(ROWS, 13, CPU)
    configs = attention_blocks.kernel_configs(16, 16, None)
    query, key = torch.empty(13, 4, 16, device="meta"), torch.empty(13, 2, 16, device="meta")
    out, lse = packed_attention.packed_attention_fwd(query, key, key, blocks, configs.forward, None, *OPTIONS)
    packed_attention_backward.packed_attention_bwd(out, query, key, key, out, lse, blocks, configs, *OPTIONS)
    placed = gather_keys.gather_keys_fwd(key, key, varlen.places.index)
    gather_keys.gather_keys_bwd(*placed, varlen.places.readers, varlen.places.first_reader)
    assert launches.keys() == {name for kernels in names.values() for name in kernels}
    assert all(options.get("enable_fp_fusion") is True for options in launches.values())
