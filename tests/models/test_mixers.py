"""Mixers on packed tokens: exact in float64, guarded by three probes, and undone without a trace."""

import copy
import gc

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.float64 import float64_throughout
from fastdpo.models import attention
from fastdpo.models.examine import probe, support
from fastdpo.models.mixers import finding, function_probe, hooks, known
from fastdpo.models.mixers.segments import Segments, Sequences, collect, gather
from tests.support.models.families import FUSED, HYBRID, WHOLE_ROWS, tiny_family
from tests.support.models.mixer_errors import SHORTEST, largest_error, pairs, results, switched

CPU = torch.device("cpu")
EXACT = 1e-11
"""Relative errors in float64. Those of states and gradients below were up to 3e-14 and 1e-13."""

KNOWN = [name for name in HYBRID if name not in WHOLE_ROWS]
WITH_STATES = [name for name in KNOWN if not name.startswith(("lfm", "jamba"))]
WITH_STATES = [name for name in WITH_STATES if name not in ("mamba", "falcon_mamba", "zamba")]


@pytest.fixture
def float64():
    with float64_throughout():
        yield


@pytest.fixture
def chosen(monkeypatch) -> list[Sequences]:
    """The sequences that scans have run."""
    found, stock = [], Segments.sequences
    monkeypatch.setattr(Segments, "sequences", lambda *args: found.append(stock(*args)) or found[-1])
    return found


@pytest.mark.parametrize("name", HYBRID)
def test_exact_in_float64(float64, chosen, name):
    """With and without shared prompts, and with both kinds of gradient checkpointing."""
    model = switched(name, torch.float64).train()
    batch = pairs()
    exact = results(model, *batch, packed=False)
    assert not chosen
    assert largest_error(results(model, *batch, packed=True), exact) < EXACT
    assert any(sequences.parents is not None for sequences in chosen) == (name in WITH_STATES)
    assert largest_error(results(model, *pairs(share=False), packed=True), exact) < EXACT
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert largest_error(results(model, *batch, packed=True), exact) < EXACT


@pytest.mark.parametrize("name", KNOWN)
def test_the_shortest_rows_are_exact_in_float64(float64, name):
    """In float32, a parameter such as `A_log` changes by a few of its own units of rounding in a step, so that two
    trainings with equal gradients may end in weights whose changes differ by a thousandth.
    """
    model = switched(name, torch.float64).train()
    batch = pairs(lengths=SHORTEST)
    assert largest_error(results(model, *batch, packed=True), results(model, *batch, packed=False)) < EXACT


def apart(segments: Segments) -> Segments:
    """The same tokens, of which no segment follows another."""
    starts = sorted((int(x[0]), len(x)) for x in segments._roots + segments._branches)
    return Segments([[start, 0, start, length] for start, length in starts], CPU)


def lose_states(monkeypatch) -> None:
    monkeypatch.setattr(Segments, "sequences", lambda self, *options: apart(self).whole_rows)


def swap_states(monkeypatch) -> None:
    stock = Segments.shared.func
    swapped = property(lambda self: (x := stock(self))._replace(parents=x.parents.flip(0)))
    monkeypatch.setattr(Segments, "shared", swapped)


def lose_halos(monkeypatch) -> None:
    stock = Segments.halos
    monkeypatch.setattr(Segments, "halos", lambda self, reach: stock(apart(self), reach))


def shift_halos(monkeypatch) -> None:
    """Loses the earliest token of each halo."""
    stock = Segments.halos

    def shifted(self, reach):
        index, keep = stock(self, reach - 1)
        return nn.functional.pad(index, (1, 0), value=self.tokens), keep + 1

    monkeypatch.setattr(Segments, "halos", shifted)


@pytest.fixture
def fresh_probe():
    """Forgets what was measured of functions before and in the test."""
    function_probe.difference.cache_clear()
    yield
    function_probe.difference.cache_clear()


def swap_rows(monkeypatch) -> None:
    stock = Segments.whole_rows.func
    swapped = property(lambda self: (x := stock(self))._replace(batches=(x.batches[0].roll(1, 0),)))
    monkeypatch.setattr(Segments, "whole_rows", swapped)


def lose_prefixes(monkeypatch) -> None:
    stock = Segments.whole_rows.func
    monkeypatch.setattr(Segments, "whole_rows", property(lambda self: stock(apart(self))))


SABOTAGES = {  # the families that notice it, and the reason
    **dict.fromkeys(
        (lose_states, swap_states), (WITH_STATES, "gives other results on packed tokens than on whole rows")
    ),
    **dict.fromkeys((swap_rows, lose_prefixes), ([*WHOLE_ROWS], "differ from its padded ones")),
    **dict.fromkeys((lose_halos, shift_halos), (KNOWN, "causal_conv1d_fn gives other results")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sabotage", "name"), [(sabotage, name) for sabotage, (names, _) in SABOTAGES.items() for name in names]
)
def test_wrong_segments_are_detected(monkeypatch, fresh_probe, name, sabotage, dtype):
    _, reason = SABOTAGES[sabotage]
    sabotage(monkeypatch)
    assert reason in str(probe.probe(switched(name, dtype), CPU).unsupported_reason)


def test_lost_prefixes_are_detected_where_rows_count_padding(monkeypatch, fresh_probe):
    """Of rows that count padding, fewer share a prefix, and in bfloat16 their error is within the bound."""
    lose_prefixes(monkeypatch)
    assert "differ from its padded ones" in str(probe.probe(switched("zaya", torch.bfloat16), CPU).unsupported_reason)


@pytest.mark.parametrize("name", HYBRID)
def test_a_mixer_without_a_layout_is_detected(monkeypatch, name):
    """Without its layout a mixer takes packed tokens for one row."""
    monkeypatch.setattr(hooks, "is_layout", lambda mask: False)
    model = tiny_family(name)
    attention.switch(model)
    assert finding.mixers_of(model)[0]._forward_pre_hooks
    reason = probe.probe(model, CPU).unsupported_reason
    assert "did not get the packed layout" in reason or "cannot be run on packed tokens" in reason


@pytest.mark.parametrize("name", KNOWN)
def test_a_mixer_that_calls_other_functions_is_detected(monkeypatch, name):
    model = tiny_family(name)
    attention.switch(model)
    mixer = finding.mixers_of(model)[0]
    with monkeypatch.context() as patch:
        for function, original in finding.functions_of(mixer).items():
            patch.setitem(finding.forward_of(type(mixer)).__globals__, function, original)
        assert "did not call causal_conv1d_fn" in str(probe.probe(model, CPU).unsupported_reason)
    attention.restore(model)


def test_mixers_are_found_by_rule():
    for name in FUSED:
        model = tiny_family(name)
        mixers = finding.mixers_of(model)
        assert bool(mixers) == (name in HYBRID)
        assert all(bool(finding.functions_of(mixer)) == (name not in WHOLE_ROWS) for mixer in mixers)
        assert not {type(mixer) for mixer in mixers} & {type(module) for module in finding.attention_modules(model)}


QWEN4 = dict(
    **dict(layer_types=["linear_attention", "indexed_attention"], num_key_value_heads=2, head_dim=8),
    **dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
    **dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    **dict(hc_count=2, hc_lowrank=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8),
    **dict(indexer_budget=8, indexer_compress_ratio=2),
)
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=97)


@pytest.mark.parametrize(
    ("kind", "sizes", "reason"),
    [
        ("rwkv", dict(attention_hidden_size=32), "RwkvForCausalLM does not let its attention implementation be set"),
        ("deepseek_v4", {}, "DeepseekV4ForCausalLM mixes tokens by other means than attention"),
        ("qwen4_exp_text", QWEN4, "layers of type indexed_attention are not supported"),
        ("deepseek_v32", {}, "layers of type indexed_attention are not supported"),
        ("glm_moe_dsa", {}, "layers of type indexed_attention are not supported"),
        ("xlstm", dict(num_heads=2, head_dim=16), "xLSTMForCausalLM mixes tokens by other means than attention"),
    ],
)
def test_other_ways_to_mix_tokens_are_not_supported(kind, sizes, reason):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sizes))
    assert support.unsupported_reason(model) == reason


def state_of(model) -> list:
    """What `switch` may change: hooks, and the globals of modeling files."""
    files = {id(file := finding.forward_of(type(module)).__globals__): file for module in model.modules()}
    functions = [file[name] for file in files.values() for name in sorted(known.WRAPPED & file.keys())]
    masks = [file.get("create_recurrent_attention_mask") for file in files.values()]
    hooked = [
        [dict(hooks) for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)]
        + [dict(hooks) for hooks in (module._forward_hooks, module._forward_hooks_always_called)]
        for module in model.modules()
    ]
    return [functions, masks, hooked]


@pytest.mark.parametrize("name", HYBRID)
def test_switching_leaves_no_trace(name):
    gc.collect()  # models that other tests have switched
    first, second = tiny_family(name), tiny_family(name, seed=1)
    before = state_of(first)
    for model in (first, second, first):
        attention.switch(model)
    assert state_of(first) != before
    assert len(finding.mixers_of(first)[0]._forward_pre_hooks) == 1
    clone = copy.deepcopy(first)
    attention.restore(first)
    assert state_of(first)[2] == before[2]
    assert probe.probe(second, CPU).unsupported_reason is None
    attention.restore(second)
    assert state_of(first) == before
    attention.restore(clone)
    assert state_of(clone)[2] == before[2]


def test_modeling_files_are_restored_when_a_model_is_gone():
    gc.collect()
    model = tiny_family("lfm2")
    before = state_of(model)[:2]
    attention.switch(model)
    assert state_of(model)[:2] != before
    del model
    gc.collect()
    assert state_of(tiny_family("lfm2"))[:2] == before


def test_functions_that_others_have_set_since_are_kept(monkeypatch):
    model = tiny_family("lfm2")
    namespace = finding.forward_of(type(finding.mixers_of(model)[0])).__globals__
    attention.switch(model)
    with monkeypatch.context() as patch:
        own = finding.functions_of(finding.mixers_of(model)[0])["causal_conv1d_fn"]
        patch.setitem(namespace, "causal_conv1d_fn", lambda *args, **kwargs: own(*args, **kwargs))
        theirs = namespace["causal_conv1d_fn"]
        attention.restore(model)
        assert namespace["causal_conv1d_fn"] is theirs
    namespace["causal_conv1d_fn"] = own


def test_a_call_in_inference_mode_leaves_nothing_behind(fresh_probe):
    """Tensors made in inference mode cannot be saved for a backward pass."""
    model, batch = switched("qwen3_5_text"), pairs()
    with torch.inference_mode():
        assert probe.probe(model, CPU).unsupported_reason is None
        with attention.named(attention.configs_of(model)):
            model.base_model(**attention.inputs_of(batch[2], batch[0]))
    assert results(model, *batch, packed=True)[1]


def test_a_compiled_model(chosen):
    """Graphs break where a layout is read, and nowhere on padded rows."""
    model = switched("qwen3_5_text").eval()
    ids, mask, layout = pairs()
    compiled = torch.compile(lambda **inputs: model.base_model(**inputs).last_hidden_state, backend="eager")
    with torch.no_grad():
        with attention.named(attention.configs_of(model)):
            expected = model.base_model(**attention.inputs_of(layout, ids)).last_hidden_state
            chosen.clear()
            assert torch.equal(compiled(**attention.inputs_of(layout, ids)), expected)
        assert any(sequences.parents is not None for sequences in chosen)
        torch._dynamo.reset()
        padded = dict(input_ids=ids, attention_mask=mask, use_cache=False)
        assert torch._dynamo.explain(model.base_model)(**padded).graph_break_count == 0


# [P | C | R], a pair that shares nothing, a row that is the prefix of another, a token that nothing attends to.
ROWS = [(0, 0, 0, 9), (0, 5, 9, 3), (12, 0, 12, 2), (14, 0, 14, 6), (20, 0, 20, 4), (20, 4, 24, 3), (27, 0, 27, 1)]


# Behind the first 6 tokens of a row a second one, behind 4 of that a third, and behind 1 of that a fourth.
TREE = [(0, 0, 0, 9), (0, 6, 9, 5), (3, 10, 14, 3), (4, 11, 17, 2), (19, 0, 19, 4)]
EITHER = pytest.mark.parametrize("rows", [ROWS, TREE], ids=["pairs", "tree"])


def tokens_of_rows(rows) -> list[list[int]]:
    found = []
    for start, length, own, n in rows:
        last = start + length - 1
        before = next((row[:length] for row in found if length and row[length - 1 :][:1] == [last]), [])
        assert len(before) == length
        found.append([*before, *range(own, own + n)])
    return found


@EITHER
def test_halos_are_the_tokens_before_each_token(rows):
    segments = Segments([*map(list, rows)], CPU)
    for reach in (0, 1, 3, 12):
        index, keep = segments.halos(reach)
        for row in tokens_of_rows(rows):
            for i, token in enumerate(row):
                before = [segments.tokens] * (reach - i) + row[max(0, i - reach) : i]
                place = int(keep[token])
                assert index[0, place - reach : place + 1].tolist() == [*before, token]


@EITHER
@pytest.mark.parametrize("way", ["whole_rows", "shared"])
def test_sequences_contain_each_token_behind_its_row(way, rows):
    segments = Segments([*map(list, rows)], CPU)
    sequences = getattr(segments, way)
    flat = torch.cat([batch.flatten() for batch in sequences.batches])
    assert flat[sequences.place].tolist() == [*range(segments.tokens)]
    values = torch.randn(1, 2, segments.tokens, 3)
    batches = [gather(values, 2, index) for index in sequences.batches]
    assert torch.equal(collect(batches, 2, sequences.place), values)
    first, *second = ([[t for t in row if t < segments.tokens] for row in x.tolist()] for x in sequences.batches)
    found = first if not second else [first[p] + row for p, row in zip(sequences.parents, second[0], strict=True)]
    assert all(row in [*found, *first] for row in tokens_of_rows(rows))


@pytest.mark.parametrize(
    ("prompt", "completions", "chunk", "shared"),
    [(200, (20, 30), 64, True), (80, (20, 30), 64, False), (100, (20, 30), 16, True), (64, (64, 64), 64, True)],
)
def test_states_are_shared_where_that_needs_fewer_chunks(prompt, completions, chunk, shared):
    first, second = completions
    segments = Segments([[0, 0, 0, prompt + first], [0, prompt, prompt + first, second]], CPU)
    assert (segments.sequences(chunk).parents is not None) == shared
    assert segments.sequences(None).parents is None
