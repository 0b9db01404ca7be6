"""Model families in TRL's DPOTrainer: fused with equal results, or falling back with a reason.

Calls outside of the trainer must be unchanged.
"""

import functools

import pytest
import torch

from fastdpo.models import attention
from fastdpo.models.examine import probe, runs
from tests.support import faults
from tests.support.comparison import assert_trained_alike
from tests.support.documents import support_tables
from tests.support.models import multimodal
from tests.support.models.families import FAILS_IN_STOCK, FUSED, GUESSES, OTHERS, STOCK, kind, tiny_family
from tests.support.trl.dpo import adapter, assert_same, assert_same_error, tiny_model, train

CPU = torch.device("cpu")
LARGEST = 100_000_000  # parameters, of models whose parts have sizes of their own


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_expert_parameters(both, name):
    """All experts of a layer are one parameter, which belongs to no linear layer."""
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    patched = assert_trained_alike(
        both(kind(name), FUSED[name][1], max_steps=2, **adapter(target_parameters=experts)), policy=2, reference=2
    )
    trained = [name for name, x in patched.gradients[0].items() if ".experts." in name and x.any()]
    assert len(trained) == 2 * 2 * 2, "A and B of two parameters in two layers"


BUILD = dict.fromkeys((*FUSED, *STOCK), tiny_family)
BUILD |= dict.fromkeys((*multimodal.FUSED, *multimodal.STOCK), multimodal.tiny_multimodal)
"""How to make a model of each family."""


@pytest.mark.parametrize("name", FAILS_IN_STOCK | multimodal.FAILS_IN_STOCK)
def test_families_that_fail_in_stock_raise_the_same_error(tmp_path, caplog, name):
    error = (FAILS_IN_STOCK | multimodal.FAILS_IN_STOCK)[name]
    assert_same_error(tmp_path, functools.partial(BUILD[name], name), error)
    assert (STOCK[name][0] if name in STOCK else multimodal.STOCK[name].features) in caplog.text


def test_the_support_page_is_up_to_date():
    assert support_tables.PAGE.read_text() == support_tables.page(), "run `make docs`"


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_family_trains_as_in_stock(both, tmp_path, name):
    def trains(tiny):
        try:
            with torch.device("meta"):
                if tiny_model(name, **tiny).num_parameters() > LARGEST:
                    return False
            train(tmp_path, *(tiny_model(name, seed, **tiny) for seed in range(2)), max_steps=1)
        except Exception:  # it needs other sizes, or TRL does not train it
            return False
        return True

    tiny = next(filter(trains, GUESSES), None)
    if tiny is None:
        pytest.skip("no tiny model of it trains in TRL")
    stock, patched = both(name, tiny, max_steps=2)
    assert_same(stock, patched)
    assert sum(patched.calls.values()) == 4


def test_an_error_in_training_mode_is_a_reason(both, caplog, monkeypatch):
    """Some multimodal models want more arguments when they are trained than when they are evaluated."""
    stock = runs.backbone

    def fails_in_training(model):
        if model.training:
            raise ValueError("`token_type_ids` are required as a model input when training")
        return stock(model)

    monkeypatch.setattr(runs, "backbone", fails_in_training)
    _, patched = both("gemma3", build=multimodal.tiny_multimodal, max_steps=1)
    assert patched.calls == {("policy", "stock"): 1, ("reference", "stock"): 1}
    assert "cannot be run on padded rows: ValueError: `token_type_ids`" in caplog.text


WITH_WINDOWS = ("mistral", "gemma3", "gemma4", "mistral3", "cohere2_vision")
FEATURES = [(name, "window", dtype) for name in WITH_WINDOWS for dtype in (torch.float32, torch.bfloat16)]
FEATURES += [("gpt_oss", "sinks", torch.float32), ("gpt_oss", "sinks", torch.bfloat16)]
FEATURES += [("granite", "scale", torch.float32), ("granite", "scale", torch.bfloat16)]
FEATURES += [("gemma2", "softcap", torch.float32)]  # whose effect in half precision is below rounding


@pytest.mark.parametrize(("name", "feature", "dtype"), FEATURES)
def test_probe_detects_an_attention_that_drops_a_feature(monkeypatch, name, feature, dtype):
    """Its rows are longer than a window, that of the text of a multimodal model as well."""
    model = BUILD[name](name).to(dtype)
    attention.switch(model)
    faults.in_attention(monkeypatch, lambda right: lambda *args, **options: right(*args, **options | {feature: None}))
    assert "differ from its padded ones" in str(probe.probe(model, CPU).unsupported_reason)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_probe_detects_differences_slightly_above_rounding(monkeypatch, name):
    """Gemma 2's softcap, which sdpa omits in some versions, changes states by only 3.5e-4."""
    model = tiny_family(name)
    attention.switch(model)
    faults.in_attention(monkeypatch, lambda right: lambda *args, **options: right(*args, **options) * 1.0003)
    assert "differ from its padded ones" in str(probe.probe(model, CPU).unsupported_reason)


def test_a_window_too_long_for_the_probe_must_be_passed_to_attention():
    window = probe.LONGEST_PROBE + 1
    for name, reason in (("mistral", None), ("phimoe", f"the window of {window} tokens is not passed")):
        model = tiny_family(name, sliding_window=window, max_position_embeddings=2 * window)
        attention.switch(model)
        unsupported_reason = probe.probe(model, CPU).unsupported_reason
        assert unsupported_reason is None if reason is None else reason in unsupported_reason


@pytest.mark.parametrize("width", [6, 40])
@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic"])
def test_probe_does_not_change_rotary_embeddings(name, width):
    """They hold what follows from the width of their last batch, and in dynamic NTK from earlier ones."""
    model = tiny_family(name).eval()
    rotary = model.model.rotary_emb

    def run(width: int) -> torch.Tensor:
        with torch.no_grad():
            return model.model(input_ids=torch.arange(3, 3 + width)[None]).last_hidden_state

    run(width)
    before = rotary.inv_freq.clone(), rotary.max_seq_len_cached
    attention.switch(model)
    assert probe.probe(model, CPU).unsupported_reason is None
    assert probe.head_difference(model, CPU) is None
    assert torch.equal(rotary.inv_freq, before[0])
    assert rotary.max_seq_len_cached == before[1]


def test_functional_dropout_is_detected():
    model = tiny_family("opt", dropout=0.1)  # torch.nn.functional.dropout, without a module
    attention.switch(model)
    assert probe.probe(model, CPU) == probe.ProbeResult(None, is_random=True)
