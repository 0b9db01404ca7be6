"""Mixers on packed tokens where flash-linear-attention, mamba_ssm and causal_conv1d are installed."""

import importlib
import inspect
from types import MethodType

import pytest
import torch

from benchmarks.float64 import float64_throughout
from fastdpo.models import attention
from fastdpo.models.examine import probe
from fastdpo.models.mixers import finding, function_probe, known
from fastdpo.models.mixers.segments import Segments
from tests.support.models.families import HYBRID, WHOLE_ROWS, tiny_family
from tests.support.models.mixer_errors import in_dtype, largest_error, pairs, results
from tests.support.stand_ins.mixer_kernels import KERNELS, install, signature_of

CPU = torch.device("cpu")
EXACT = 1e-11
FLA = ("chunk_gated_delta_rule", "chunk_kda")
WHOLE_MIXERS = ("mamba_split_conv1d_scan_combined", "mamba_inner_fn")
KNOWN = [name for name in HYBRID if name not in WHOLE_ROWS]


def model_of(name: str, dtype: torch.dtype = torch.float32):
    return in_dtype(tiny_family(name), dtype).train()


def has_kernel_for_whole_mixer(model) -> bool:
    return any(known.WHOLE_MIXERS & finding.functions_of(mixer).keys() for mixer in finding.mixers_of(model))


@pytest.fixture
def packed_models():
    """Switches models, and switches them back before the functions that they call are restored."""
    switched = []

    def switch(model):
        attention.switch(model)
        switched.append(model)
        return model

    yield switch
    for model in switched:
        attention.restore(model)


@pytest.mark.parametrize("name", KNOWN)
def test_kernels_get_packed_tokens(monkeypatch, packed_models, name):
    model = model_of(name, torch.float64)
    with float64_throughout():
        exact = results(model, *(batch := pairs()), packed=False)
        calls = install(monkeypatch, model)
        packed_models(model)
        assert largest_error(results(model, *batch, packed=True), exact) < EXACT
        assert calls.made or name == "lfm3"  # whose convolutions are too wide for the package
        assert not calls.of(*WHOLE_MIXERS)
        results(model, *batch, packed=False)
        assert bool(calls.of(*WHOLE_MIXERS)) == has_kernel_for_whole_mixer(model)


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear"])
def test_kernels_of_flash_linear_attention_get_no_padding(monkeypatch, packed_models, name):
    """Prompts in one row and completions in another, without a copy of a prompt. All layers get the
    same bounds, since the kernels keep what they derive from them by the identity of the tensor.
    """
    layers = dict(layer_types=["linear_attention", "linear_attention", "full_attention"], num_hidden_layers=3)
    model = tiny_family(name, **layers).to(torch.bfloat16)
    calls = install(monkeypatch, model)
    ids, _, layout = pairs()
    with attention.named(attention.configs_of(packed_models(model))):
        model.base_model(**attention.inputs_of(layout, ids))
    found = calls.of(*FLA)
    assert len(found) == 4
    assert sum(each["q"].shape[1] for each in found) == 2 * len(layout.token_index)
    for first, second in zip(found[:2], found[2:], strict=True):
        assert first["cu_seqlens"] is second["cu_seqlens"]
        assert first["cu_seqlens_cpu"] is second["cu_seqlens_cpu"]
    assert [each["initial_state"] is None for each in found] == [True, False] * 2
    assert all(each["initial_state"].dtype == torch.float32 for each in found[1::2])


def test_sequences_in_one_row():
    """A prompt is shared where that needs fewer chunks, and rows are not padded where it is not."""
    segments = Segments([[0, 0, 0, 50], [0, 30, 50, 20]], CPU)
    bounds = segments.sequences(64, in_one_row=True).bounds
    assert [each["cu_seqlens"].tolist() for each in bounds] == [[0, 50, 100]]
    bounds = segments.sequences(16, in_one_row=True).bounds
    assert [each["cu_seqlens"].tolist() for each in bounds] == [[0, 30], [0, 20, 40]]


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2", "mamba"])
def test_the_probe_accepts_kernels(monkeypatch, packed_models, name):
    model = model_of(name)
    calls = install(monkeypatch, model)
    assert probe.probe(packed_models(model), CPU).unsupported_reason is None
    assert calls.made
    assert all(map(finding.called_by, finding.mixers_of(model)))


def cumulative_sum(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
    """A kernel that takes no notice of states and bounds."""
    out = ((q * k).sum((2, 3), keepdim=True) + v) * (g + beta)[..., None]
    state = v.new_ones(len(cu_seqlens) - 1, v.shape[2], k.shape[3], v.shape[3]) if output_final_state else None
    return out.cumsum(1), state


def test_wrong_kernels_run_on_whole_rows(monkeypatch, packed_models, caplog):
    model = model_of("qwen3_5_text")
    install(monkeypatch, model, chunk_gated_delta_rule=cumulative_sum)
    packed_models(model)
    assert all(map(finding.called_by, finding.mixers_of(model)))
    assert probe.probe(model, CPU).unsupported_reason is None
    assert not any(map(finding.called_by, finding.mixers_of(model)))
    assert caplog.text.count("mixers of Qwen3_5ForCausalLM run on whole rows") == 1
    assert "torch_chunk_gated_delta_rule gives other results on packed tokens than on whole rows" in caplog.text
    ids, mask, layout = pairs()
    found = results(model, ids, mask, layout, packed=True)
    assert largest_error(found, results(model, ids, mask, layout, packed=False)) < 1e-4


def test_a_kernel_without_bounds_runs_on_whole_rows(monkeypatch, packed_models):
    model = model_of("qwen3_5_text")
    install(monkeypatch, model, chunk_gated_delta_rule=lambda q, k, v, g, beta, initial_state=None: None)
    assert not any(map(finding.called_by, finding.mixers_of(packed_models(model))))


@pytest.mark.parametrize("sabotage", ["parents", "bounds"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear"])
def test_wrong_states_of_kernels_are_detected(monkeypatch, packed_models, caplog, name, sabotage):
    stock = Segments.shared_in_one.func

    def wrong(self):
        sequences = stock(self)
        if sabotage == "parents":
            return sequences._replace(parents=sequences.parents.flip(0))
        roots, branches = sequences.bounds
        mirrored = {name: bounds[-1] - bounds.flip(0) for name, bounds in branches.items()}
        return sequences._replace(bounds=(roots, mirrored))

    monkeypatch.setattr(Segments, "shared_in_one", property(wrong))
    model = model_of(name)
    install(monkeypatch, model)
    assert probe.probe(packed_models(model), CPU).unsupported_reason is None
    assert "gives other results on packed tokens than on whole rows" in caplog.text


def test_functions_that_are_replaced_after_the_probe_are_noticed(monkeypatch, packed_models):
    model = packed_models(model_of("lfm2"))
    ids, _, layout = pairs()
    inputs = attention.inputs_of(layout, ids)
    with attention.named(attention.configs_of(model)):
        model.base_model(**inputs)
    namespace = finding.forward_of(type(finding.mixers_of(model)[0])).__globals__
    with monkeypatch.context() as patch:
        patch.setitem(namespace, "causal_conv1d_fn", lambda *args, **kwargs: args[0])
        error = pytest.raises(RuntimeError, match="the functions that Lfm2ShortConv calls have been replaced")
        with error, attention.named(attention.configs_of(model)):
            model.base_model(**inputs)


def test_a_kernel_for_a_whole_mixer_gets_whole_rows(monkeypatch, packed_models):
    model = model_of("qwen3_5_text", torch.float64)
    rows = []

    def kernel(self, hidden_states, *args, **kwargs):
        rows.append(len(hidden_states))
        return type(self).forward(self, hidden_states, *args, **kwargs)

    with float64_throughout():
        exact = results(model, *(batch := pairs()), packed=False)
        for mixer in finding.mixers_of(model):
            mixer.forward = MethodType(kernel, mixer)
        packed_models(model)
        assert largest_error(results(model, *batch, packed=True), exact) < EXACT
    assert set(rows) == {len(batch[2].rows)}


@pytest.mark.parametrize("name", KERNELS)
def test_signatures_are_those_of_the_packages(name):
    """Where the packages are installed."""
    pytest.importorskip(KERNELS[name].module.split(".")[0])
    module = importlib.import_module(KERNELS[name].module)
    real = inspect.signature(getattr(module, name)).parameters.values()
    expected = signature_of(name).parameters.values()
    assert [(x.name, x.kind, x.default) for x in real] == [(x.name, x.kind, x.default) for x in expected]


@pytest.fixture(autouse=True)
def _forget_functions():
    yield
    function_probe.difference.cache_clear()
