"""Tiny models of trainings that are compared, and when two trainings are the same. Of any trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
    tie_word_embeddings=False,
)


DIGITS_OF_LOSSES = 4  # of transformers 4 and TRL's OnlineDPOTrainer, after the point


def sharpen(model: torch.nn.Module) -> None:
    """Draws weights anew: the usual 0.02 makes every attention uniform, and a wrong mask nearly right."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.2)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.1)


def assert_same_logs(stock: Sequence[dict], patched: Sequence[dict], rtol: float, atol: float) -> None:
    """Every number of every log agrees. Losses that a trainer has rounded may lie on two sides of a half."""
    assert len(stock) == len(patched) > 0
    for step, (a, b) in enumerate(zip(stock, patched, strict=True)):
        assert a.keys() == b.keys(), f"step {step} logs other metrics"
        for name in a:
            rounded = "loss" in name and all(x == round(x, DIGITS_OF_LOSSES) for x in (a[name], b[name]))
            allowed = rtol * abs(a[name]) + atol + rounded * 1.01 * 10**-DIGITS_OF_LOSSES
            assert abs(a[name] - b[name]) <= allowed, f"step {step}: {name} {a[name]} {b[name]}"


def assert_same_gradients(stock: Sequence[dict], patched: Sequence[dict], rtol: float) -> None:
    """Every parameter's gradient of every step agrees."""
    for step, (a, b) in enumerate(zip(stock, patched, strict=True)):
        assert a.keys() == b.keys(), f"step {step} has gradients of other parameters"
        for name in a:
            error, size = (a[name] - b[name]).norm().item(), a[name].norm().item()
            assert error <= rtol * size + 1e-7, f"step {step}: gradient of {name} differs by {error} of {size}"
