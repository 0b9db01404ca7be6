"""The host side of attention on GPUs, without a GPU: the choice of a backend."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastdpo.ops import attention_backends
from fastdpo.ops.attention_calls import AttentionOptions

GPU = torch.device("cuda", 0)
ROWS = torch.tensor([[0, 0, 0, 9], [0, 5, 9, 4]], dtype=torch.int32, device="cpu")
OPTIONS = AttentionOptions(1.0, None, None)


def gpu_inputs(dtype):
    """query and value on a GPU, without memory."""
    with FakeTensorMode():
        return torch.empty(13, 4, 16, dtype=dtype, device=GPU), torch.empty(13, 2, 16, dtype=dtype, device=GPU)


def test_float32_on_a_gpu_runs_in_pieces_with_a_logged_reason(monkeypatch, caplog):
    pytest.importorskip("triton")
    attention_backends._log_unsupported.cache_clear()
    monkeypatch.delenv(attention_backends.VARIABLE, raising=False)
    query, value = gpu_inputs(torch.float32)
    for _ in range(2):
        assert attention_backends.prepare_call(query, value, ROWS, OPTIONS) is None
    assert caplog.text.count("triton: it needs float16 or bfloat16; got torch.float32") == 1


def test_triton_takes_16_bits_on_a_gpu_and_float32_only_in_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    triton = attention_backends.BACKENDS["triton"]
    for dtype in (torch.float16, torch.bfloat16):
        assert triton.unsupported_reason(*gpu_inputs(dtype), OPTIONS) is None
    monkeypatch.setattr("fastdpo.ops.devices.TRITON_DEVICES", ("cpu",))
    query = torch.empty(13, 4, 16, device="cpu")
    assert triton.unsupported_reason(query, query, OPTIONS) is None


def test_a_selected_triton_refuses_float32(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv(attention_backends.VARIABLE, "triton")
    with pytest.raises(NotImplementedError, match=r"got triton: it needs float16 or bfloat16; got torch\.float32"):
        attention_backends.prepare_call(*gpu_inputs(torch.float32), ROWS, OPTIONS)
