"""Multimodal models in TRL's DPOTrainer on pairs of text."""

import functools
import logging

import pytest
import torch

from fastdpo.models import attention
from fastdpo.models.examine import probe, runs
from fastdpo.models.parts import language_model, text_config
from tests.support import faults
from tests.support.comparison import assert_far_from_same, assert_trained_alike
from tests.support.models.multimodal import FAILS_IN_STOCK, FUSED, STOCK, tiny_multimodal
from tests.support.trl.dpo import adapter, assert_fused, assert_same, assert_same_bits, assert_same_error, train_both

CPU = torch.device("cpu")
LORA_TARGETS = r".*(language_model|text_model)\..*\.(q_proj|v_proj)"  # PEFT does not know Gemma 4's tower


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both, tmp_path, build=tiny_multimodal)


@pytest.mark.parametrize("name", FUSED)
def test_same_training(both, name):
    # TRL's own router loss fails for this configuration, which has `n_routed_experts`.
    options = dict(router_aux_loss_coef=0.0) if name == "glm4v_moe" else {}
    assert_trained_alike(both(name, max_steps=2, **options), policy=2, reference=2)


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["stored", "reentrant", "recomputed"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3_vl", "smolvlm"])
def test_same_training_with_gradient_checkpointing(both, name, lora, use_reentrant):
    options = adapter(target_modules=LORA_TARGETS) if lora else {}
    if use_reentrant is not None:
        options |= dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
    assert_trained_alike(both(name, max_steps=2, evaluate=4, **options), policy=2, reference=3, eval=1)


def test_router_loss(both):
    patched = assert_trained_alike(both("qwen3_vl_moe", max_steps=2, router_aux_loss_coef=0.5), policy=2, reference=2)
    assert "aux_loss" in patched.logs[0]


def test_reference_is_precomputed(both):
    stock, patched = both("gemma3", max_steps=2, precompute_ref_log_probs=True)
    assert_same(stock, patched)
    assert patched.calls["policy", "fused"] == 2
    assert {path for _, path in patched.calls} == {"fused"}


@pytest.mark.parametrize("name", [name for name in STOCK if name not in FAILS_IN_STOCK])
def test_unsupported_families_fall_back_to_stock(both, caplog, name):
    with caplog.at_level(logging.WARNING, logger="fastdpo"):
        stock, patched = both(name, max_steps=2)
    assert_trained_alike((stock, patched), {("policy", "stock"): 2, ("reference", "stock"): 2}, same=assert_same_bits)
    messages = [record.message for record in caplog.records if STOCK[name].features in record.message]
    assert len(messages) == 2, "once for the policy, once for the reference"


@pytest.mark.parametrize("name", FAILS_IN_STOCK)
def test_families_that_fail_in_stock_raise_the_same_error(tmp_path, caplog, name):
    assert_same_error(tmp_path, functools.partial(tiny_multimodal, name), FAILS_IN_STOCK[name])
    assert STOCK[name].features in caplog.text


def test_a_model_without_a_language_model_is_unsupported(both, caplog):
    def with_another_config(model):
        language_model(model).config = text_config(model).__class__(**text_config(model).to_dict())
        return model

    _, patched = both("llava", max_steps=1, prepare=with_another_config)
    assert patched.calls == {("policy", "stock"): 1, ("reference", "stock"): 1}
    assert "LlavaForConditionalGeneration has no language model with its text configuration" in caplog.text


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FUSED)
def test_only_the_language_model_is_switched(name, implementation):
    if (name, implementation) == ("got_ocr2", "sdpa"):
        pytest.skip("transformers has no sdpa for its tower")
    model = tiny_multimodal(name, attn_implementation=implementation)
    parts = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    before = [part.config._attn_implementation for part in parts]
    attention.switch(model)
    assert attention.implementation(model) != attention.present(model)
    for part, earlier in zip(parts, before, strict=True):
        in_language_model = part.config is text_config(model)
        assert in_language_model == (part.config._attn_implementation != earlier)
    attention.restore(model)
    assert [part.config._attn_implementation for part in parts] == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", FUSED)
def test_probe_accepts_half_precision(name, dtype):
    model = tiny_multimodal(name).to(dtype)
    attention.switch(model)
    assert probe.probe(model, CPU).unsupported_reason is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral3", "cohere2_vision"])
def test_probe_reads_the_window_of_the_text(monkeypatch, name, dtype):
    """The probe's rows are longer than the window, so that an attention without it is noticed."""
    model = tiny_multimodal(name).to(dtype)
    attention.switch(model)
    faults.in_attention(monkeypatch, lambda right: lambda *args, **options: right(*args, **{**options, "window": None}))
    assert "differ from its padded ones" in str(probe.probe(model, CPU).unsupported_reason)


def test_an_error_in_training_mode_is_a_reason(both, caplog, monkeypatch):
    """Some multimodal models want more arguments when they are trained than when they are evaluated."""
    stock = runs.backbone

    def fails_in_training(model):
        if model.training:
            raise ValueError("`token_type_ids` are required as a model input when training")
        return stock(model)

    monkeypatch.setattr(runs, "backbone", fails_in_training)
    _, patched = both("gemma3", max_steps=1)
    assert patched.calls == {("policy", "stock"): 1, ("reference", "stock"): 1}
    assert "cannot be run on padded rows: ValueError: `token_type_ids`" in caplog.text


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_the_comparison_detects_wrong_positions(both, monkeypatch, name):
    faults.unnoticed_by_probes(monkeypatch)
    faults.late_positions(monkeypatch)
    stock, sabotaged = both(name, max_steps=1)
    assert_fused(sabotaged, policy=1, reference=1)
    assert_far_from_same(stock, sabotaged, stock.in_float64)
