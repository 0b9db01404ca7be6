"""Calls 1, 2, 4, 8, ... of a model with code of users are compared with stock, so what no walk over it finds shows."""

import functools
import gc
import random
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

import fastdpo
from fastdpo.models import calls, deciding
from fastdpo.models.examine import examination, probe
from tests.integrations.test_custom_loops import own_logps
from tests.support import faults
from tests.support.comparison import assert_same_bits
from tests.support.kernels import recorder
from tests.support.models.planted import Scaled, Wrapped, in_layers
from tests.support.trl.dpo import LORA, tiny_model, train

WORDS = 32
MIXED = 0.5
BEGINS, NOTICED, CALLS = 5, 8, 10


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and labels of two pairs, [4, 11] each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, WORDS, (4, 11), generator=generator)
    ids[2:, :6] = ids[:2, :6]
    return ids, ids.masked_fill(torch.arange(11) < 5, -100)


def llama(**config) -> nn.Module:
    return tiny_model(**config).double().train()


def prepared(plant: Callable[[nn.Module], Any]) -> nn.Module:
    model = llama()
    plant(model)
    return fastdpo.prepare(model)


def scored(model: nn.Module, seed: int = 0) -> tuple[str, Tensor]:
    """The path of a call with gradients, and its log-probabilities."""
    before, (ids, labels) = fastdpo.calls.copy(), batch(seed)
    logps = fastdpo.score(model, ids, labels=labels).logps
    logps.sum().backward()
    ((_, _, path),) = {x for x in fastdpo.calls - before if x[2] != "replayed"}
    return path, logps.detach()


def assert_own(model: nn.Module, logps: Tensor, seed: int = 0) -> None:
    with torch.no_grad():
        ids, labels = batch(seed)
        torch.testing.assert_close(logps, own_logps(model, ids, torch.ones_like(ids), labels), rtol=1e-9, atol=1e-9)


class Mixing(Wrapped):
    """Adds a share of a row's mean, which a function says."""

    def __init__(self, inner: nn.Module, share):
        super().__init__(inner)
        self.__dict__["share"] = share

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) + float(self.share(self)) * hidden.mean(1, keepdim=True)


SHARE = 0.0


def in_a_global(model):
    in_layers(functools.partial(Mixing, share=lambda module: SHARE))(model)
    return lambda value: globals().update(SHARE=value)


def in_a_frozen_parameter(model):
    in_layers(functools.partial(Mixing, share=lambda module: module.amount))(model)
    for layer in model.model.layers:
        layer.mlp.amount = nn.Parameter(torch.zeros(()), requires_grad=False)
    return lambda value: [layer.mlp.amount.data.fill_(value) for layer in model.model.layers]


def in_an_array(model):
    share = np.zeros(1)
    in_layers(functools.partial(Mixing, share=lambda module: share[0]))(model)
    return share.fill


@pytest.mark.parametrize("place", [in_a_global, in_a_frozen_parameter, in_an_array], ids=lambda x: x.__name__)
def test_a_fault_that_begins_later(place, caplog):
    model = llama()
    switch = place(model)
    fastdpo.prepare(model)
    paths = []
    for call in range(1, CALLS + 1):
        switch(MIXED if call >= BEGINS else 0.0)
        path, logps = scored(model)
        paths.append(path)
        if call < BEGINS or call >= NOTICED:
            assert_own(model, logps)
    switch(0.0)
    assert paths == ["fused"] * (NOTICED - 1) + ["stock"] * (CALLS - NOTICED + 1)
    (message,) = caplog.messages
    assert message.startswith("fastdpo: fastdpo.score (policy): not fused, call 8 (policy, step ")
    assert "stock -" in message
    assert message.endswith("[different-calls]")


def test_strict_mode_raises(monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    model = llama()
    switch = in_an_array(model)
    fastdpo.prepare(model)
    for _ in range(NOTICED - 1):
        scored(model)
    switch(MIXED)
    with pytest.raises(fastdpo.NotFused, match=r"call 8 .* differs from stock in log-probabilities by"):
        scored(model)


class OfTheRow(torch.autograd.Function):
    """Returns hidden states as they are. Their gradient is scaled by the length of the row."""

    @staticmethod
    def forward(ctx, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * (1 + gradient.shape[1] / 100)


class WithGradientsOfTheRow(Wrapped):
    is_on = False

    def forward(self, hidden: Tensor) -> Tensor:
        return OfTheRow.apply(self.inner(hidden)) if WithGradientsOfTheRow.is_on else self.inner(hidden)


@pytest.mark.parametrize("begins", [1, 2])
def test_a_fault_in_the_gradient_only(begins, monkeypatch, caplog):
    faults.unnoticed_by_probes(monkeypatch)
    model = prepared(in_layers(WithGradientsOfTheRow))
    paths = []
    for call in range(1, 4):
        monkeypatch.setattr(WithGradientsOfTheRow, "is_on", call >= begins)
        paths.append(scored(model)[0])
    assert paths == ["fused"] * (begins - 1) + ["stock"] * (4 - begins)
    (message,) = caplog.messages
    assert f"call {begins} (policy" in message
    assert "log-probabilities" not in message
    assert "gradient of MLP by" in message


@pytest.mark.parametrize(("plant", "audits"), [(lambda model: None, 0), (in_layers(Scaled), 3)], ids=["stock", "own"])
def test_which_models_are_audited(plant, audits):
    model, before = prepared(plant), calls.outcomes.copy()
    assert [scored(model)[0] for _ in range(7)] == ["fused"] * 7
    assert (calls.outcomes - before).total() == audits


class Noisy(Scaled):
    """Draws dropout by a function, and counts what its own generator would draw."""

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.dropout(super().forward(hidden), 0.2, self.training)


OPTIONS = {
    "full": {},
    "adapters with dropout": dict(peft_config=LoraConfig(**{**LORA, "lora_dropout": 0.3}), reference=None),
    "checkpointing": dict(gradient_checkpointing=True),
}


def kept_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [Scaled, Noisy], ids=lambda x: x.__name__)
def test_no_trace(kind, options, tmp_path, monkeypatch, caplog):
    """A training with audits is the same, to the bit, as one without, with the calls of hooks and random states."""
    runs, states, seen, kept = [], [], [], []
    for audited in (False, True):
        if not audited:
            monkeypatch.setattr(deciding, "audit", lambda *args: None)
        else:
            monkeypatch.undo()
        before, model, reference = kept_tensors(), tiny_model(), tiny_model(seed=1)
        for each in (model, reference):
            in_layers(kind)(each)
        hooked: list[int] = []
        model.register_forward_hook(lambda *args, hooked=hooked: hooked.append(1))
        torch.manual_seed(7)
        random.seed(7)
        with fastdpo.patched("trl.DPOTrainer"):
            runs.append(train(tmp_path / str(audited), model, **{"reference": reference, **options}, max_steps=5))
        states.append((torch.get_rng_state().tolist(), random.random()))
        kept.append(kept_tensors() - before)
        seen.append(len(hooked))
    assert_same_bits(*runs)
    assert runs[0].logs == runs[1].logs
    assert runs[0].calls == runs[1].calls
    assert {path for _, path in runs[1].calls} == {"fused"}
    assert states[0] == states[1]
    assert seen[0] == seen[1] > 0
    assert kept[1] <= kept[0]
    assert caplog.messages == []


def of_the_configuration(model, number):
    model.config.step = number


def of_the_model(model, number):
    model.global_step = number


def of_a_layer(model, number):
    model.model.layers[0].self_attn.step = number


def of_a_list(model, number):
    steps = vars(model.model.layers[1]).setdefault("steps", [])
    steps.append(number)


def of_a_buffer(model, number):
    if "progress" not in dict(model.model.named_buffers(recurse=False)):
        model.model.register_buffer("progress", torch.zeros(()))
    model.model.progress.fill_(number)


@pytest.mark.parametrize("plant", [lambda model: None, in_layers(Scaled)], ids=["stock", "own code"])
@pytest.mark.parametrize("write", [of_the_configuration, of_the_model, of_a_layer, of_a_list, of_a_buffer])
def test_a_number_that_is_written_in_each_step(write, plant, monkeypatch, caplog):
    probed, own = [], probe.probe
    monkeypatch.setattr(probe, "probe", lambda *args: probed.append(args) or own(*args))
    model, paths = prepared(plant), []
    for number in range(20):
        write(model, number)
        path, logps = scored(model, seed=number)
        paths.append(path)
        assert_own(model, logps, seed=number)
    assert paths == ["fused"] * 20
    assert len(probed) <= examination.FREE_EXAMINATIONS
    assert caplog.messages == []


def test_a_number_that_comes_to_matter(caplog):
    """A value changes in each step, and so is not examined any more, and mixes tokens in the end."""
    plant = in_layers(functools.partial(Mixing, share=lambda module: 0.0 if module.amount < 17 else MIXED))
    model, paths = prepared(plant), []
    for number in range(40):
        for layer in model.model.layers:
            layer.mlp.amount = number
        path, logps = scored(model)
        paths.append(path)
        assert number >= 20 or "[different-calls]" not in caplog.text  # call 16 was the last one that was compared
    assert paths[:17] == ["fused"] * 17
    assert path == "stock"
    assert_own(model, logps)
    assert len(caplog.messages) == 1


def mixed_by_class(monkeypatch):
    own = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: own(self, x) + x.mean(1, keepdim=True))


def other_masks(monkeypatch):
    """Each token sees itself and the one before alone."""
    own = modeling_llama.create_causal_mask

    def create_causal_mask(*args, **kwargs):
        mask, hidden = own(*args, **kwargs), kwargs["inputs_embeds"]
        if mask is not None and mask.dtype == torch.int32:  # of fastdpo
            return mask
        places = torch.arange(hidden.shape[1])
        distance = places[:, None] - places
        return ((distance >= 0) & (distance < 2))[None, None].expand(len(hidden), 1, -1, -1)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_causal_mask)


def other_positions(monkeypatch):
    own = modeling_llama.apply_rotary_pos_emb

    def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
        return own(q + q.mean(2, keepdim=True), k, cos, sin, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)


def other_attention(monkeypatch):
    own = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(query, key, value, *args, **kwargs):
        return own(query, key, value.cumsum(2), *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", scaled_dot_product_attention)


@pytest.mark.parametrize("change", [mixed_by_class, other_masks, other_positions, other_attention])
def test_code_that_is_replaced_between_calls(change, monkeypatch, caplog):
    """It is seen in the next call, as hooks are."""
    model = fastdpo.prepare(llama())
    assert [scored(model)[0] for _ in range(3)] == ["fused"] * 3
    with monkeypatch.context() as replacing:
        change(replacing)
        path, logps = scored(model)
        assert path == "stock"
        assert_own(model, logps)
    assert len(caplog.messages) == 1
    path, logps = scored(model)
    assert path == "fused"
    assert_own(model, logps)


class Turns(nn.Embedding):
    """Scales by the turn, of which three separators begin the next: random rows hardly hold so many."""

    separator = 4

    def forward(self, ids: Tensor) -> Tensor:
        turns = (ids == self.separator).cumsum(1) // 3
        return super().forward(ids) * (1 + turns[..., None] / 4)


def test_separators_that_the_configuration_names(caplog):
    model = llama(eos_token_id=Turns.separator)
    model.model.embed_tokens.__class__ = Turns
    fastdpo.prepare(model)
    path, logps = scored(model)  # without any
    assert path == "stock"
    assert "[different-states]" in caplog.text
    assert_own(model, logps)


class Capacity(Wrapped):
    """An expert for each of four kinds of tokens, with room for a part of the tokens of the batch."""

    def __init__(self, inner: nn.Module, factor: float):
        super().__init__(inner)
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        expert = (flat[:, 0] > 0).long() + 2 * (flat[:, 1] > 0).long()
        room = int(self.factor * len(flat) / 4)
        place = functional.one_hot(expert, 4).cumsum(0)[torch.arange(len(flat)), expert]
        return self.inner(hidden) * (place <= room).view(*hidden.shape[:2], 1)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_experts_with_a_capacity(factor, caplog):
    model = prepared(in_layers(functools.partial(Capacity, factor=factor)))
    assert scored(model)[0] == "stock"
    assert "[different-" in caplog.text


class Scaling(Mixing):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) * (1 + self.share(self))


def test_replays_of_old_values(monkeypatch, caplog):
    """A recording holds the value of a global. The layers run once a replay was compared."""
    recorder.install(monkeypatch)
    model, replayed = prepared(in_layers(functools.partial(Scaling, share=lambda module: SHARE))), []
    for call in range(16):
        globals().update(SHARE=0.0 if call < 7 else MIXED)
        before = fastdpo.calls.copy()
        path, logps = scored(model, seed=call % 2)
        assert path == "fused"
        replayed.append(any(x[2] == "replayed" for x in fastdpo.calls - before))
    globals().update(SHARE=MIXED)
    assert_own(model, logps, seed=1)
    globals().update(SHARE=0.0)
    assert True in replayed
    assert not replayed[-1]
    (message,) = caplog.messages
    assert "[graphs-changed]" in message


def in_groups(parts: int):
    """Adds to each token the mean of its group of a row: shifted sparse attention in short."""

    def mix(hidden: Tensor) -> Tensor:
        size = max(1, hidden.shape[1] // parts)
        groups = functional.pad(hidden, (0, 0, 0, -hidden.shape[1] % size)).unflatten(1, (-1, size))
        return (groups + groups.mean(2, keepdim=True)).flatten(1, 2)[:, : hidden.shape[1]]

    return mix


def by_the_end(hidden: Tensor) -> Tensor:
    return hidden + hidden[:, -1:]


MIXED_ROWS = {"quarters": in_groups(4), "thirds": in_groups(3), "ends": by_the_end}


@pytest.mark.parametrize("name", MIXED_ROWS)
def test_attention_that_depends_on_the_width_of_rows(name, monkeypatch):
    """Whether it is packed as whole rows or falls back, for rows whose widths are even numbers of groups and not."""
    own = modeling_llama.LlamaAttention.forward

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        output, weights = own(self, hidden_states, position_embeddings, attention_mask, **kwargs)
        return (MIXED_ROWS[name](output) if self.training else output), weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    for width in (22, 23, 24):
        model = fastdpo.prepare(llama())
        ids = torch.randint(6, WORDS, (4, width), generator=torch.Generator().manual_seed(width))
        ids[2:, :9] = ids[:2, :9]
        labels = ids.masked_fill(torch.arange(width) < 9, -100)
        for _ in range(2):
            found = fastdpo.score(model, ids, labels=labels).logps
            expected = own_logps(model, ids, torch.ones_like(ids), labels)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def counting_in_a_list(module: nn.Module) -> list:
    module.seen = []
    handle = module.register_forward_pre_hook(lambda module, args: module.seen.append(len(args)))
    return [handle, lambda: delattr(module, "seen")]


def timing(module: nn.Module) -> list:
    module.times = {"begin": 0, "end": 0}
    before = module.register_forward_pre_hook(lambda module, args: module.times.update(begin=module.times["begin"] + 1))
    after = module.register_forward_hook(lambda module, args, output: module.times.update(end=module.times["end"] + 1))
    return [before, after, lambda: delattr(module, "times")]


@pytest.mark.parametrize("begin", [counting_in_a_list, timing])
def test_a_profiler_of_one_step(begin):
    """Its hooks are of an engine, and keep state. The model, and an equal one, are fused again without them."""
    begin = FunctionType(begin.__code__, {**globals(), "__name__": "deepspeed.profiling.flops_profiler.profiler"})
    policy, reference = (fastdpo.prepare(llama(seed=seed)) for seed in range(2))
    paths = []
    for step in range(6):
        ending = [x for module in policy.modules() for x in begin(module)] if step == 2 else []
        paths.append((scored(policy)[0], scored(reference)[0]))
        for end in ending:
            end() if callable(end) else end.remove()
    assert [x for x, _ in paths] == ["fused", "fused", "stock", "fused", "fused", "fused"]
    assert [x for _, x in paths] == ["fused"] * 6
