"""Activations of checkpointed layers that are kept: by how many bytes, in drawn worlds, and with equal numbers."""

import os
import random
import re
import sys
from contextlib import nullcontext
from functools import partial
from types import ModuleType

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

import fastdpo
from fastdpo.models import scoring
from fastdpo.models.running import activations, compiled, graphs, pace
from fastdpo.models.running.activations import FLAG, Room
from fastdpo.models.state import state_of
from fastdpo.ops import memory
from fastdpo.ops.attention import packed_attention
from tests.models.test_graphs import batch, loss_of, with_adapters
from tests.support.comparison import tiny
from tests.support.faults import out_of_memory
from tests.support.fuzzing import VARIABLE
from tests.support.kernels import recorder
from tests.support.models.families import tiny_family
from tests.support.models.sharded import sharded
from tests.support.ref_logps import ranks
from tests.support.stand_ins.activation_memory import PROFILES, Device, Simulation, drawn, least_device, world_of

WORLDS = int(os.environ.get(VARIABLE, 600)) // 10
"""10,000 in `make fuzz`."""

RARE = (503, 634)
"""Worlds where a call that may be recorded keeps more than that of the peak."""

BATCHES = [
    batch((9, 4, 6), (12, 7, 3)),
    batch((20, 12, 9), (3, 9, 8)),
    batch((2, 1, 7)),
    batch((9, 9, 9), (4, 4, 4)),
    batch((30, 6, 12), (6, 8, 9), (2, 2, 2)),
    batch((12, 12, 7)),
]
"""Smaller and larger ones than all before."""


@pytest.fixture(autouse=True)
def training(monkeypatch):
    monkeypatch.setattr(pace, "trainings", [pace.Training()])


def simulated(world, multiple):
    """A training on a device of so many times the bytes that the trainer itself needs. It has trained on each pair of
    each step once.
    """
    device = Device(multiple * least_device(world))
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulation = Simulation(world, device, monkeypatch).run()
    assert [sorted(x) for x in simulation.trained] == [[*range(len(x))] for x in world.lengths]
    return simulation


def test_drawn_worlds():
    """On devices from one in which the trainer fits just so, no training runs out of memory, and what is spent stays
    within four fifths of the device less what others used when it was decided. They may grow afterwards. A recording
    that finds room leaves enough for the largest batch.
    """
    for seed in (*range(WORLDS), *RARE):
        world, multiple = drawn(seed), random.Random(seed).choice([1.0, 1.1, 1.3, 2.0, 5.0, 10.0])
        simulation = simulated(world, multiple)
        if world.calls > 1:
            assert not any(map(sum, simulation.kept[1:])), "nobody knows how many calls will follow"
        assert simulation.excess <= 1e-6 * simulation.device.total, seed
        assert not simulation.repeated, seed
        assert world.calls > 1 or all(x >= 0 for x in simulation.rooms), seed


SCHEDULES = {"2 x 8": (2, 8), "4 x 4": (4, 4), "1 x 16": (1, 16), "8 x 1": (8, 1)}


@pytest.mark.parametrize("growth", [0.0, 0.03])
@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_at_published_lengths(schedule, profile, is_full, growth):
    """Of a 0.5B model in bfloat16. More memory is spent where there is more, and no more than there is."""
    sizes = dict(laws=[(0.0, 60e3, 0.0)], kinds=24 * [0], width=1.8e3, tiles=300e3 * is_full, chunk=600e6, other=70e3)
    sizes |= dict(weights=2e9, states=4e9 * is_full, gradients=40e6 * is_full, growth=growth, is_full=is_full)
    draw = random.Random(0)
    world = world_of(draw, PROFILES[profile], *SCHEDULES[schedule], steps=10, **sizes)
    runs = [simulated(world, multiple) for multiple in (1.0, 1.3, 2.0, 10.0)]
    for run in runs:
        assert run.excess <= 1e-6 * run.device.total  # above four fifths
        assert not run.repeated
    layers = [sum(map(sum, run.kept[3:])) / sum(map(len, run.kept[3:])) for run in runs]
    assert layers[0] < layers[-1]
    assert layers[-1] > 6  # of 24, in a training of few steps, each of which may have the largest batch
    assert len(runs[-1].micro_batches[-1]) <= (1 if schedule == "8 x 1" else SCHEDULES[schedule][1] / 2)


def llama(**config):
    return tiny(AutoModelForCausalLM, "llama", 97, num_hidden_layers=4, **config)


def half_frozen():
    model = llama()
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    return model


MODELS = {
    "full": llama,
    "full in bfloat16": lambda: llama().bfloat16(),
    "lower layers frozen": half_frozen,
    "LoRA": lambda: with_adapters(llama()),
    "LoRA in bfloat16": lambda: with_adapters(llama()).bfloat16(),
    "LoRA with dropout": lambda: with_adapters(llama(), lora_dropout=0.3),
    "LoRA in upper layers": lambda: with_adapters(
        llama(), layers_to_transform=[2], target_modules=["q_proj", "up_proj"]
    ),
    "DoRA": lambda: with_adapters(llama(), use_dora=True),
    "experts": lambda: tiny_family("mixtral", num_hidden_layers=4),
    "experts, LoRA": lambda: with_adapters(tiny_family("qwen3_moe", num_hidden_layers=4)),
    "windows": lambda: tiny_family("gemma2"),
    "gated delta rule": lambda: tiny_family("qwen3_5_text"),
    "convolutions": lambda: tiny_family("lfm2"),
}
PLENTY = 1e15
CHUNKED = "gated delta rule"  # whose rows are padded to whole chunks
PARTLY = "a part of the layers"


def checkpointed(make, use_reentrant=False, **options):
    model = make().train()
    model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant, **options))
    if use_reentrant:
        model.enable_input_require_grads()
    return model


def train(model, monkeypatch, keeps, steps=12, autocast=False):
    """The losses and gradients of all steps, and the numbers of kept layers."""
    monkeypatch.setattr(pace, "trainings", [pace.Training()])
    monkeypatch.setenv(memory.VARIABLE, "1" if keeps else "0")
    if keeps == PARTLY:
        given = [PLENTY, 300_000, 0, 100_000]
        monkeypatch.setattr(Room, "begin", lambda self, size, now, step: given[(step + size[0]) % 4])
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.01)
    found, kept, before = [], [], fastdpo.calls.copy()
    fused = state_of(getattr(model, "base_model", model).model if hasattr(model, "peft_config") else model)
    flags = [vars(x).get(FLAG) for x in model.modules()]
    torch.manual_seed(3)
    for i in range(steps):
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = loss_of(model, BATCHES[i % len(BATCHES)])
        kept.append(len(fused.runner.kept.kept))
        loss.backward()
        assert [vars(x).get(FLAG) for x in model.modules()] == flags
        found.append([loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
        optimizer.step()
        optimizer.zero_grad()
    assert fastdpo.calls - before == {("fastdpo.score", "policy", "fused"): steps}
    return found, kept, len(fused.structure.identities), fused.examinations


def assert_equal(ours, expected):
    for step, (x, y) in enumerate(zip(ours, expected, strict=True)):
        assert all(torch.equal(*pair) for pair in zip(x, y, strict=True)), step


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keeps", ["all layers", PARTLY])
def test_bits_are_equal(monkeypatch, name, use_reentrant, keeps):
    make = partial(checkpointed, MODELS[name], use_reentrant)
    expected, none, identities, examinations = train(fastdpo.prepare(make()), monkeypatch, None, steps=8)
    ours, kept, *of_ours = train(fastdpo.prepare(make()), monkeypatch, keeps, steps=8)
    assert_equal(ours, expected)
    assert sum(none) == 0 < sum(kept[2:])
    assert of_ours == [identities, examinations]
    assert keeps == PARTLY or kept[:2] == [0, 0]
    assert len(set(kept)) > (
        2 if keeps == PARTLY and name not in ("windows", "gated delta rule", "convolutions") else 1
    )


@pytest.mark.parametrize("name", ["full", "LoRA"])
def test_bits_are_equal_under_autocast(monkeypatch, name):
    make = partial(checkpointed, MODELS[name])
    expected, *_ = train(fastdpo.prepare(make()), monkeypatch, None, autocast=True)
    ours, kept, *_ = train(fastdpo.prepare(make()), monkeypatch, PARTLY, autocast=True)
    assert_equal(ours, expected)
    assert sum(kept) > 0


@pytest.mark.parametrize("name", [pytest.param("full", marks=pytest.mark.thorough), "LoRA with dropout"])
def test_bits_are_equal_with_compiled_layers(monkeypatch, name):
    """Each kind of layer has one more graph for kept layers, and one for each mode before."""
    AcceleratorState._reset_state()  # another trainer may have compiled its model
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    made = torch._dynamo.utils.counters["stats"]
    made.clear()
    models = [fastdpo.prepare(checkpointed(MODELS[name]), compile=True) for _ in range(2)]
    expected, *_ = train(models[0], monkeypatch, None)
    without = made.pop("unique_graphs")
    ours, kept, *_ = train(models[1], monkeypatch, PARTLY)
    assert_equal(ours, expected)
    assert sum(kept) > 0
    assert 0 < made["unique_graphs"] <= 2 + without


class Live(TorchDispatchMode):
    """The bytes of what operators have made, for as long as it lives."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.made[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        return result

    def bytes(self):
        return sum(size for storage, size in self.made.items() if not storage.expired())


def live_bytes(model, given, monkeypatch, room):
    """The bytes that the forward of a batch leaves alive, and those that are expected of kept layers."""
    monkeypatch.setattr(Room, "begin", lambda *_: room)
    with Live() as live:
        loss = loss_of(model, given)
    expected = base_of(model).runner.kept.bytes
    size = live.bytes()
    loss.backward()
    return size, expected


@pytest.mark.parametrize("name", MODELS)
def test_expected_bytes_between_the_smallest_and_the_largest_batch(monkeypatch, name):
    """Of all operators of a forward, above those that a forward with recomputed layers leaves. Within 5 %; where
    rows are padded to whole chunks, no less, and up to 15 % more.
    """
    monkeypatch.setattr(packed_attention, "is_traced", torch.compiler.is_compiling)
    monkeypatch.setenv(memory.VARIABLE, "1")
    model = fastdpo.prepare(checkpointed(MODELS[name]))
    smallest, between, largest = (batch((8 * n, 3 * n, 5 * n), (5 * n, 7 * n, n)) for n in (4, 9, 14))
    for given in (smallest, largest):
        live_bytes(model, given, monkeypatch, 0.0)
    none, _ = live_bytes(model, between, monkeypatch, 0.0)
    size, expected = live_bytes(model, between, monkeypatch, PLENTY)
    assert expected > 0
    least, most = (1.0, 1.15) if name == CHUNKED else (0.95, 1.05)
    assert least <= expected / (size - none) <= most


def base_of(model):
    return next(state for state in map(state_of, model.modules()) if state is not None)


@pytest.mark.parametrize("place", ["in a layer", "behind the head"])
@pytest.mark.parametrize("name", ["full", "LoRA with dropout"])
def test_a_call_without_memory_runs_again(monkeypatch, caplog, name, place):
    """And later ones of at least its size recompute all layers."""
    expected, *_ = train(fastdpo.prepare(checkpointed(MODELS[name])), monkeypatch, None)
    model = fastdpo.prepare(checkpointed(MODELS[name]))
    if place == "in a layer":  # the last one that computes, of which a call with kept layers has no recompute
        stock, seen = activations.KeptActivations.run, []

        def run(self, backbone):
            output = stock(self, backbone)
            seen.append(None)
            if len(seen) == 8:
                self._pending.clear()  # as before the backbone has returned
                raise torch.OutOfMemoryError("planted")
            return output

        monkeypatch.setattr(activations.KeptActivations, "run", run)
    else:
        out_of_memory(monkeypatch, 7)
    ours, kept, *_ = train(model, monkeypatch, "all layers")
    assert_equal(ours, expected)
    assert kept[7] == 0
    assert 4 in kept[8:]
    (warning,) = [x.message for x in caplog.records if x.levelname == "WARNING" and "fastdpo" in x.message]
    assert "out of memory with the activations of 4 layers kept: batches of" in warning


def test_kept_layers_go_before_recordings_and_the_error_is_raised_after_both(monkeypatch, caplog):
    model = fastdpo.prepare(checkpointed(llama))
    train(model, monkeypatch, "all layers", steps=5)
    monkeypatch.setenv(memory.VARIABLE, "1")
    released = []
    monkeypatch.setattr(scoring, "release_recordings", lambda fused: released.append(None) or len(released) == 1)
    pace.training().done = 5
    out_of_memory(monkeypatch, 0, 1)
    loss_of(model, BATCHES[0]).backward()
    assert len(released) == 1
    out_of_memory(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        loss_of(model, BATCHES[0])
    assert len(released) == 2


LEFT_ALONE = {
    "the variable is 0": lambda patch, model: patch.setenv(memory.VARIABLE, "0"),
    "the variable is not set": lambda patch, model: patch.delenv(memory.VARIABLE),
    "an engine": lambda patch, model: patch.setitem(sys.modules, "vllm", ModuleType("vllm")),
    "parts of ZeRO-3": lambda patch, model: setattr(next(model.parameters()), "ds_id", 0),
    "another function": lambda patch, model: functions(model, lambda function, *args: function(*args)),
    "another context": lambda patch, model: functions(
        model, partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), nullcontext()))
    ),
    "layers that are not checkpointed": lambda patch, model: [
        setattr(layer, FLAG, False) for layer in model.model.layers
    ],
}


def functions(model, function):
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = function


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(monkeypatch, case):
    model = fastdpo.prepare(checkpointed(llama))
    monkeypatch.setenv(memory.VARIABLE, "1")
    LEFT_ALONE[case](monkeypatch, model)
    monkeypatch.setattr(Room, "begin", lambda *_: PLENTY)
    monkeypatch.setattr(activations.Sizes, "is_known", lambda *_: True)
    monkeypatch.setattr(activations.Sizes, "expected", lambda *_: 1.0)
    read = []
    monkeypatch.setattr(memory, "report", lambda device: read.append(device))
    loss_of(model, BATCHES[0]).backward()
    assert not base_of(model).runner.kept.kept
    assert not read, "nothing is asked of the device"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_without_random_states_a_model_with_dropout_is_left_alone(monkeypatch, dropout):
    """Its recompute draws other masks than its forward, and kept layers would give other gradients."""
    make = partial(checkpointed, lambda: with_adapters(llama(), lora_dropout=dropout), preserve_rng_state=False)
    _, kept, *_ = train(fastdpo.prepare(make()), monkeypatch, "all layers")
    assert (sum(kept) > 0) == (dropout == 0.0)


def test_left_alone_where_activations_are_offloaded_and_in_other_calls(monkeypatch):
    model = fastdpo.prepare(checkpointed(llama))
    train(model, monkeypatch, "all layers")
    pace.training().done = 12
    kept = base_of(model).runner.kept
    with torch.autograd.graph.save_on_cpu():
        loss_of(model, BATCHES[0]).backward()
    assert kept._call is None
    loss_of(model, BATCHES[0]).backward()
    assert kept._call is not None
    with torch.no_grad():
        loss_of(model, BATCHES[0])
    assert kept._call is None
    loss_of(model.eval(), BATCHES[0]).backward()
    assert kept._call is None


def test_every_second_layer(monkeypatch):
    """The others keep their activations anyway."""

    def make():
        model = checkpointed(llama)
        for layer in model.model.layers[::2]:
            layer.gradient_checkpointing = False
        return model

    expected, *_ = train(fastdpo.prepare(make()), monkeypatch, None)
    model = fastdpo.prepare(make())
    ours, kept, *_ = train(model, monkeypatch, "all layers")
    assert_equal(ours, expected)
    assert max(kept) == 2
    assert [x.gradient_checkpointing for x in model.model.layers] == 2 * [False, True]


def test_calls_before_one_backward_keep_nothing(monkeypatch):
    """How many more of them there will be is not known."""
    model = fastdpo.prepare(checkpointed(llama))
    train(model, monkeypatch, "all layers")
    kept = base_of(model).runner.kept
    pace.training().done = 12
    first = loss_of(model, BATCHES[0])
    assert len(kept.kept) == 4
    second = loss_of(model, BATCHES[0])
    assert not kept.kept
    (first + second).backward()
    loss_of(model, BATCHES[0]).backward()
    assert not kept.kept


def test_a_recording_and_its_trial_see_the_layers_as_the_call_runs_them(monkeypatch):
    stand_in = recorder.install(monkeypatch)
    monkeypatch.setenv(memory.VARIABLE, "1")
    monkeypatch.setattr(pace, "is_on", lambda: True)
    model, seen = fastdpo.prepare(checkpointed(llama)), []
    monkeypatch.setattr(Room, "begin", lambda *_: PLENTY)
    stock = graphs.trial_of

    def trial_of(*args):
        seen.append([x.gradient_checkpointing for x in model.model.layers])
        return stock(*args)

    monkeypatch.setattr(graphs, "trial_of", trial_of)
    monkeypatch.setattr(pace.Pace, "is_sure", lambda *_: False)
    small, large = batch((9, 4, 6)), batch((30, 6, 12), (6, 8, 9))
    for given in (small, large, *4 * [BATCHES[0]]):
        loss_of(model, given).backward()
    kept = base_of(model).runner.kept
    assert stand_in.replays > 0
    assert 4 * [False] in seen
    assert fastdpo.calls["fastdpo.score", "policy", "replayed"] > 0
    assert (kept.kept, kept.bytes) == ([], 0.0), "a replay runs no layers"
    assert [x.gradient_checkpointing for x in model.model.layers] == 4 * [True]


def test_the_log_says_what_is_kept(monkeypatch, caplog):
    caplog.set_level("INFO", "fastdpo")
    monkeypatch.setattr(memory, "held", {})
    train(fastdpo.prepare(checkpointed(llama)), monkeypatch, "all layers")
    (line,) = [x for x in caplog.messages if "keeps" in x]
    assert re.fullmatch(
        r"fastdpo: fastdpo.score \(policy\): keeps the activations of 4 of 4 layers in batches of up to \d+ tokens; "
        "FASTDPO_AUTO=0 recomputes them",
        line,
    )
    assert [x.rpartition(": ")[0] for x in memory.lines()] == ["fastdpo: cpu, activations"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["full", "LoRA"])
def test_ranks_that_keep_different_numbers_of_layers(monkeypatch, tmp_path, engine, name):
    """Losses and gradients are, to the last bit, those of ranks that recompute all layers."""

    def run(rank: int, keeps: bool):
        monkeypatch.setenv(memory.VARIABLE, str(int(keeps)))
        given = [[0.0, PLENTY, 300_000, 0.0], [PLENTY, 300_000, 0.0, 0.0]][rank]
        monkeypatch.setattr(Room, "begin", lambda self, size, now, step: given[(step + 1) % 4])
        pace.trainings[:] = [pace.Training()]
        torch.manual_seed(0)
        inner = checkpointed(MODELS[name])
        fastdpo.prepare(inner)
        model = DistributedDataParallel(inner) if engine == "ddp" else sharded(inner)
        optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.01)
        found, kept = [], []
        for i in range(8):
            loss = loss_of(model, BATCHES[(i + rank) % len(BATCHES)])
            kept.append(len(base_of(inner).runner.kept.kept))
            loss.backward()
            found.append([loss.detach(), *(local(x.grad).clone() for x in model.parameters() if x.grad is not None)])
            optimizer.step()
            optimizer.zero_grad()
        return found, kept

    def work(rank: int):
        fastdpo.calls.clear()
        return run(rank, False), run(rank, True), fastdpo.calls.copy()

    kept_by_ranks = []
    for (expected, none), (ours, kept), calls in ranks(2, tmp_path, work):
        assert_equal(ours, expected)
        assert sum(none) == 0
        assert {path for _, _, path in calls} == {"fused"}
        kept_by_ranks.append(kept)
    first, second = kept_by_ranks
    assert {0, 4} < {*first} | {*second}
    assert sum(x != y for x, y in zip(first, second, strict=True)) > 3


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x
