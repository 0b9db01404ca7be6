"""Recordings under DDP, whose backward is several graphs, so that gradients are reduced while it goes on."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel

import fastdpo
from fastdpo.models.running import recording
from tests.integrations.test_custom_loops import own_logps
from tests.models.test_graphs import (
    BATCHES,
    WAYS,
    WORDS,
    Twins,
    assert_same_bits,
    checkpointed,
    gradients,
    llama,
    loss_of,
    replays,
    step,
    with_adapters,
)
from tests.support.comparison import assert_same_gradients
from tests.support.kernels import recorder as stand_ins
from tests.support.models.families import tiny_family
from tests.support.ref_logps import ranks


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    return stand_ins.install(monkeypatch)


@pytest.fixture
def reduced(monkeypatch):
    """Has calls run as if a DDP called them."""
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", object())


def of_four(**config):
    """A model of four layers: one in each segment."""
    return llama(num_hidden_layers=4, **config)


def with_trained(layers):
    """Adapters of which those in some layers are trained."""
    model = with_adapters(of_four())
    for i, layer in enumerate(model.get_base_model().model.layers):
        if i not in layers:
            layer.requires_grad_(False)
    return model


SEGMENTS = {
    "full": (llama, 3),  # the embedding and two layers
    "four layers": (of_four, 4),
    "LoRA": (lambda: with_adapters(of_four()), 4),
    "LoRA of the first layers": (lambda: with_trained([0, 1]), 4),
    "LoRA of the last layers": (lambda: with_trained([2, 3]), 2),
    "checkpointing": (lambda: checkpointed(False, of_four()), 4),
    "reentrant checkpointing": (lambda: checkpointed(True, of_four()), 4),
    "tied embeddings": (lambda: of_four(tie_word_embeddings=True), 4),
    "windows": (lambda: tiny_family("gemma3_text", WORDS), 3),
    "sinks": (lambda: tiny_family("gpt_oss", WORDS), 3),
    "inputs of each layer": (lambda: tiny_family("gemma3n_text", WORDS), 1),  # computed before the first one
    "values of each layer": (lambda: tiny_family("gemma4_text", WORDS), 1),
}
"""Models, and the segments that the backward of each has."""


@pytest.mark.parametrize("name", SEGMENTS)
def test_same_bits(name, reduced, recorder):
    make, number = SEGMENTS[name]
    twins = Twins(make().train())
    assert [twins.compare(given) for given in BATCHES] == [0, 1, 1, 1, 1]
    before = recorder.replays
    step(twins.models[0], BATCHES[0])
    assert recorder.replays - before == 1 + number


@pytest.mark.parametrize("do", WAYS, ids=lambda x: x.__name__)
def test_ways_to_train(do, reduced):
    twins = Twins(llama())
    assert twins.compare(BATCHES[0], do) < twins.compare(BATCHES[1], do)
    assert len({twins.compare(given, do) for given in BATCHES[2:] * 2}) == 1


def test_a_backward_of_some_segments(reduced):
    """Those that are left out, and those that run again, have the activations of their batch."""
    model = fastdpo.prepare(of_four())
    for given in BATCHES[:2]:
        step(model, given)
    expected = step(model, BATCHES[2])
    loss, other = (loss_of(model, BATCHES[i]) for i in (2, 3))
    for i, between in ((3, False), (3, False), (1, False), (3, True), (0, True), (2, True)):
        name = f"model.layers.{i}.mlp.up_proj.weight"
        (found,) = torch.autograd.grad(loss, model.get_parameter(name), retain_graph=True)
        assert torch.equal(found, expected[name])
        if between:
            torch.autograd.grad(other, model.get_parameter(name), retain_graph=True)


def test_two_replays_in_one_backward(reduced, recorder):
    """The activations of one are computed again, once."""
    twins = Twins(of_four())
    counts = []

    def both(model, given):
        model.zero_grad()
        loss = loss_of(model, given) + loss_of(model, BATCHES[3])
        before = recorder.replays
        loss.backward()
        counts.append(recorder.replays - before)
        return gradients(model)

    assert [twins.compare(given, both) for given in BATCHES[:3]] == [1, 2, 2]
    assert counts[-2:] == [9, 0]


def penalized(model, given):
    model.zero_grad()
    loss = loss_of(model, given)
    trained = [x for x in model.parameters() if x.requires_grad]
    found = torch.autograd.grad(loss, trained, create_graph=True)
    (loss + 0.1 * sum(x.square().sum() for x in found)).backward()
    return gradients(model)


def test_gradients_that_are_differentiated_again(reduced):
    ours, layers = (fastdpo.prepare(llama(attn_implementation="eager").double(), compile=x) for x in ("auto", False))
    before = replays()
    for given in BATCHES[:3]:
        assert_same_gradients([penalized(ours, given)], [penalized(layers, given)])
    assert replays() - before == 2


def with_unused():
    model = of_four()
    model.unused = torch.nn.Linear(2, 2)
    return model


CASES = {
    "full": (of_four, {}),
    "tied embeddings": (lambda: of_four(tie_word_embeddings=True), {}),
    "LoRA": (lambda: with_adapters(of_four()), {}),
    "checkpointing": (lambda: checkpointed(True, of_four()).train(), {}),
    "unused parameters": (with_unused, dict(find_unused_parameters=True)),
    "static graph": (of_four, dict(static_graph=True)),
}
"""Models, and options of DDP."""

KINDS = ["stock", "one segment", "four segments"]


def loss_by(kind, model, given):
    if kind != "stock":
        return loss_of(model, given)
    chosen, rejected = (0.1 * own_logps(model, *given).sum(1)).chunk(2)
    return -logsigmoid(chosen - rejected).mean()


def train(name, kind, rank, recorder):
    """Losses and gradients of four steps, and the reductions of the last one: how many graphs were launched before, and
    the names of parameters. Every second step accumulates two batches.
    """
    make, options = CASES[name]
    torch.manual_seed(0)
    model = make()
    if kind != "stock":
        fastdpo.prepare(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **options)
    names, found, reductions = {id(x): name for name, x in model.named_parameters()}, {}, []

    def reduce(_, bucket):
        reductions.append((recorder.replays - before, [names[id(x)] for x in bucket.parameters()]))
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, reduce)
    for i in range(4):
        model.zero_grad()
        reductions.clear()
        for j in range(1 + i % 2):
            given, before = BATCHES[(i + j + 2 * rank) % len(BATCHES)], recorder.replays
            with nullcontext() if j == i % 2 else ddp.no_sync():
                loss = loss_by(kind, ddp, given)
                loss.backward()
            found[f"loss {i} {j}"] = loss.detach()
        found |= {f"{i} {name}": x for name, x in gradients(model).items()}
    return found, reductions


def graph_of(name):
    """The number of the graph that computes the gradient of a parameter. The first one is the forward."""
    layer = re.search(r"layers\.(\d)", name)
    if layer:
        return 5 - int(layer[1])
    return 5 if "embed_tokens" in name else 2 if "norm" in name else 0


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name, recorder, monkeypatch, tmp_path):
    """Gradients of a segment are reduced before the next one is launched."""

    def train_all(rank):
        found = [train(name, kind, rank, recorder) for kind in KINDS[::2]]
        monkeypatch.setattr(recording, "first_layers", lambda _: set())
        return [*found, train(name, KINDS[1], rank, recorder)]

    for (stock, _), (four, reductions), (one, at_once) in ranks(2, tmp_path, train_all):
        assert_same_gradients([stock], [one])
        assert_same_bits(four, one)
        assert [x for x, _ in reductions] == [max(1, *map(graph_of, names)) for _, names in reductions]
        assert len({x for x, _ in reductions}) >= 4
        assert {x for x, _ in at_once} <= {1, 2}
