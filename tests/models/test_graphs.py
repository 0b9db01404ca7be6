"""Calls replay CUDA graphs of the backbone, or on the CPU what stands in for them (see `recorder`)."""

import copy
import functools
import gc
import re
import weakref
from contextlib import contextmanager
from types import MethodType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.functional import logsigmoid
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import fastdpo
from fastdpo.models.running import Runner, graphs, recording
from fastdpo.ops.attention import routes
from tests.support.comparison import tiny
from tests.support.kernels import recorder as stand_ins
from tests.support.models.families import tiny_family

WORDS = 97


@pytest.fixture(autouse=True)
def _no_calls():
    before = fastdpo.calls.copy()
    fastdpo.calls.clear()
    yield
    fastdpo.calls.clear()
    fastdpo.calls.update(before)


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level("INFO", "fastdpo")


@pytest.fixture(autouse=True)
def stand_in(device, monkeypatch):
    monkeypatch.setenv("FASTDPO_ATTENTION", "triton")  # whose gradients are the same bits in each run
    if device == "cpu":
        monkeypatch.delenv("FASTDPO_ATTENTION")
        return stand_ins.install(monkeypatch)
    stand_ins.always(monkeypatch)
    return None


@pytest.fixture
def recorder(stand_in):
    return stand_in or pytest.skip("it asks the stand-in")


def batch(*lengths, seed=0):
    """Padded ids, mask and labels of pairs with prompts, chosen and rejected answers of these lengths."""
    draw = functools.partial(torch.randint, 3, WORDS, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    prompts = [draw((p,)) for p, *_ in lengths]
    rows = [
        (prompt, draw((answers[i],))) for i in range(2) for prompt, (_, *answers) in zip(prompts, lengths, strict=True)
    ]
    shape = len(rows), max(len(p) + len(a) for p, a in rows)
    ids, labels = torch.zeros(shape, dtype=torch.long, device="cpu"), torch.full(shape, -100, device="cpu")
    for i, (p, a) in enumerate(rows):
        ids[i, : len(p) + len(a)] = torch.cat([p, a])
        labels[i, len(p) : len(p) + len(a)] = a
    return ids, (ids != 0).long(), labels


BATCHES = [
    batch((9, 4, 6), (12, 7, 3)),
    batch((14, 5, 2), (3, 9, 8)),
    batch((20, 9, 12)),
    batch((2, 1, 30), (6, 1, 1)),
    batch((1, 1, 1), (1, 2, 1), (3, 1, 9), (5, 6, 7), (1, 2, 3)),
]
"""Batches of 33 to 48 packed tokens: other rows, prefixes and scored tokens."""


def loss_of(model, given):
    given = (x.to(model.device) for x in given)
    chosen, rejected = (0.1 * fastdpo.score(model, *given).sums()).chunk(2)
    return -logsigmoid(chosen - rejected).mean()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model, given):
    model.zero_grad()
    loss = loss_of(model, given)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def run(model, given):
    with torch.no_grad():
        return {"loss": loss_of(model, given)}


@contextmanager
def watched():
    """A list of whether each packed call in the block was replayed."""
    replayed, begin, states = [], Runner.begin, Runner.states

    def begin_watched(self, *args):
        replayed.append(False)
        return begin(self, *args)

    def watch(self, *args):
        found = states(self, *args)
        replayed[-1] = found is not None
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "begin", begin_watched)
        patch.setattr(Runner, "states", watch)
        yield replayed


@contextmanager
def by_layers(replayed):
    """The layers run in the block, over the same padding where calls of `watched` were replayed."""
    calls, is_padded = iter(replayed), []

    def run_padded(self, verdict, inputs, index):
        if not is_padded[-1]:
            return None
        inputs = recording.padded(inputs, graphs.rounded_up(inputs["input_ids"].shape[1]))
        return verdict.backbone(**inputs).last_hidden_state[0].index_select(0, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "begin", lambda *_: is_padded.append(next(calls)))
        patch.setattr(Runner, "states", run_padded)
        yield
    assert not [*calls]


assert_same_bits = functools.partial(assert_close, rtol=0, atol=0)


def replays():
    return sum(n for (*_, path), n in fastdpo.calls.items() if path == "replayed")


class Twins:
    """A prepared model, and a copy of it whose layers run."""

    def __init__(self, model, dtype=None):
        has_experts = any("experts" in name for name, _ in model.named_modules())
        self.check = assert_close if has_experts else assert_same_bits  # they take other padding
        model.to(dtype or (torch.float32 if model.device.type == "cpu" else torch.bfloat16))  # which kernels take
        self.models = model, copy.deepcopy(model)
        for each in self.models:
            fastdpo.prepare(each)

    def compare(self, given, do=step):
        """Compares both on a batch, and returns how many calls were replayed."""
        before = replays()
        with watched() as replayed:
            found = do(self.models[0], given)
        assert replays() - before == sum(replayed)
        with by_layers(replayed):
            self.check(found, do(self.models[1], given))
        return sum(replayed)

    def change(self, how):
        return [how(each) for each in self.models]


def llama(**config):
    return tiny(AutoModelForCausalLM, "llama", WORDS, **config)


def with_adapters(model=None, **options):
    config = LoraConfig(**dict(target_modules="all-linear", init_lora_weights=False) | options)
    return get_peft_model(model or llama(), config)


def checkpointed(use_reentrant, model=None):
    model = model or llama()
    model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    return model


MODELS = {
    "full": llama,
    "LoRA": with_adapters,
    "checkpointing": lambda: checkpointed(False),
    "reentrant checkpointing": lambda: checkpointed(True),
    "tied embeddings": lambda: llama(tie_word_embeddings=True),
    "frozen": lambda: llama().requires_grad_(False),
    "windows": lambda: tiny_family("gemma3_text", WORDS),
    "sinks": lambda: tiny_family("gpt_oss", WORDS),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_bits(name):
    """The first batch runs the layers, the second one is recorded, and all others replay."""
    twins = Twins(MODELS[name]().train())
    do = run if name == "frozen" else step
    assert {graphs.rounded_up(33), graphs.rounded_up(48)} == {48}
    assert [twins.compare(given, do) for given in BATCHES * 2] == [0] + 9 * [1]


def test_float64(recorder, caplog):
    twins = Twins(llama(), torch.float64)
    assert [twins.compare(given) for given in BATCHES] == [0, 1, 1, 1, 1]
    assert not [x for x in caplog.messages if "no CUDA graphs" in x]


def test_memory_is_shared_on_one_device(recorder):
    model = fastdpo.prepare(llama())
    for given in BATCHES[:2]:
        policy_step, reference = step(model, given), run(model, given)
        assert torch.equal(policy_step["loss"], reference["loss"])
    memories = {id(x.memory): x.memory for x in recorder.recordings}.values()
    assert [x.device for x in memories] == [model.device] * 2
    others = {recording.memory_of(torch.device("cuda", i), True) for i in (0, 1, 0)}
    assert len(others) == 2


def under_autocast(model, given):
    with torch.autocast(model.device.type, torch.bfloat16):
        return step(model, given)


def in_evaluation(model, given):
    """Under inference mode, as `predict` of some loops, and in training mode afterwards."""
    model.eval()
    with torch.inference_mode():
        found = run(model, given)
    model.train()
    return found


def accumulated(model, given):
    """Two backward passes, of which the first one's gradients are kept."""
    model.zero_grad(set_to_none=False)
    loss_of(model, given).backward()
    first = {name: p.grad for name, p in model.named_parameters()}
    kept = gradients(model)
    loss_of(model, BATCHES[2]).backward()
    assert all(p.grad is first[name] for name, p in model.named_parameters())
    second = gradients(model)
    model.zero_grad()
    loss_of(model, BATCHES[0]).backward()
    assert_same_bits({name: x.clone() for name, x in first.items()}, second)
    return {f"{i} {name}": x for i, found in enumerate((kept, second, gradients(model))) for name, x in found.items()}


def two_live(model, given):
    """The second forward overwrites the activations of the first one."""
    model.zero_grad()
    losses = [loss_of(model, x) for x in (given, BATCHES[3])]
    losses[0].backward()
    losses[1].backward()
    return {"first": losses[0].detach(), "second": losses[1].detach(), **gradients(model)}


def twice(model, given):
    model.zero_grad()
    loss = loss_of(model, given)
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def reference_between(model, given):
    """As TRL does: the reference runs between forward and backward of the policy, here by the same model."""
    model.zero_grad()
    loss = loss_of(model, given)
    other = run(model, given)["loss"]
    loss.backward()
    return {"other": other, **gradients(model)}


WAYS = [under_autocast, in_evaluation, accumulated, two_live, twice, reference_between]


@pytest.mark.parametrize("do", WAYS, ids=lambda x: x.__name__)
def test_ways_to_train(do):
    twins = Twins(llama())
    assert twins.compare(BATCHES[0], do) < twins.compare(BATCHES[1], do)
    assert len({twins.compare(given, do) for given in BATCHES[2:] * 2}) == 1


def trained(batches=BATCHES):
    """A model that was trained on batches: the second one is recorded, and later ones are replayed."""
    model = fastdpo.prepare(llama())
    for given in batches:
        step(model, given)
    return model


def test_a_weight_that_was_written_to_before_the_backward(recorder):
    model = trained()
    loss = loss_of(model, BATCHES[0])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_forward_without_a_backward_keeps_no_model(recorder):
    model = trained()
    loss_of(model, BATCHES[0])
    weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    del model
    gc.collect()
    assert weight() is None


def scale(model):
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.scaling["default"] *= 3


def write_data(model):
    for p in model.parameters():
        p.data = p.data * 2


def freeze(model):
    model.get_base_model().model.embed_tokens.requires_grad_(True)
    next(p for name, p in model.named_parameters() if "lora_A" in name).requires_grad_(False)


def replace(model):
    layer = model.get_base_model().model.layers[0].mlp
    layer.act_fn = torch.nn.Tanh()


class Gated(torch.nn.Module):
    """A layer with a gate that `owner` holds, by default itself."""

    def __init__(self, inner, owner=None, of=lambda gate: gate):
        super().__init__()
        self.inner = inner
        self.__dict__["owner"], self.__dict__["of"] = owner or (lambda: self), of
        if owner is None:
            self.gate = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.inner(x) * self.of(self.owner().gate)


def gated(owner_of=lambda model: None, **options):
    model = llama()
    for layer in model.model.layers:
        owner = owner_of(model)
        layer.mlp = Gated(layer.mlp, owner and (lambda owner=owner: owner), **options)
    return model


def beside(model):
    """A module that is no part of the model, but is copied with it."""
    if "beside" not in vars(model):
        vars(model)["beside"] = torch.nn.Module()
        vars(model)["beside"].gate = torch.nn.Parameter(torch.ones(1))
    return vars(model)["beside"]


def of_the_model(model):
    model.gate = torch.nn.Parameter(torch.ones(1))
    return model


def squared(gate):
    return gate.square()


CHANGES = {
    "weights in place": (lambda model: [p.data.mul_(1.5) for p in model.parameters()], True),
    "other memory": (write_data, False),
    "scales of adapters": (scale, False),
    "trained parameters": (freeze, False),
    "a module": (replace, False),
    "a number in the configuration": (lambda model: model.config.update(dict(rms_norm_eps=1.0)), False),
    "evaluation mode": (lambda model: model.eval(), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes(name):
    """Recordings go on with other values in the same memory. After any other change, there are new ones."""
    change, is_same = CHANGES[name]
    twins = Twins(with_adapters())
    assert [twins.compare(given) for given in BATCHES] == [0, 1, 1, 1, 1]
    twins.change(change)
    assert [twins.compare(given) for given in BATCHES] == [int(is_same), 1, 1, 1, 1]


@pytest.mark.parametrize("value", [1.0, 2.0])
def test_gates_that_are_replaced(value):
    """Also by equal ones: replays would give gradients to the old ones."""
    models = [fastdpo.prepare(gated().float().train(), compile=compile) for compile in (False, "auto")]
    for i, given in enumerate(BATCHES * 2):
        if i == 4:
            for layer in (layer for model in models for layer in model.model.layers):
                layer.mlp.gate = torch.nn.Parameter(torch.full((1,), value))
        assert_close(*(step(model, given) for model in reversed(models)))
        assert all(layer.mlp.gate.grad is not None for model in models for layer in model.model.layers)
    assert replays() > 5


OUTSIDE = {
    "of the model": lambda: gated(of_the_model),
    "of a module beside it": lambda: gated(beside),
    "computed before": lambda: gated(beside, of=squared),
    "under checkpointing": lambda: checkpointed(False, gated(beside)),
    "under reentrant checkpointing": lambda: checkpointed(True, gated(beside)),
    "of a frozen model": lambda: frozen_but_for_the_gate(gated(beside)),
}


def frozen_but_for_the_gate(model):
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    return model


@pytest.mark.parametrize("name", OUTSIDE)
def test_trained_tensors_that_are_no_parameters_of_the_backbone(name, caplog):
    models = [OUTSIDE[name]().float().train() for _ in range(2)]
    for model, compile in zip(models, (False, "auto"), strict=True):
        fastdpo.prepare(model, compile=compile)
    owners = [model if name == "of the model" else vars(model)["beside"] for model in models]
    for given in BATCHES:
        for owner in owners:
            owner.gate.grad = None
        steps = [step(model, given) for model in models]
        assert_close(*reversed(steps))
        assert_close(owners[1].gate.grad, owners[0].gate.grad)
        assert owners[0].gate.grad.abs() > 0
    assert replays() == 0
    assert "layers use trained tensors that are not among their parameters [graphs-tensors]" in caplog.text


def policy_and_reference(model, given):
    """The reference is the policy without its adapters."""
    found = step(model, given)
    with model.disable_adapter():
        return {"reference": run(model, given)["loss"], **found}


def test_adapters_that_are_disabled():
    twins = Twins(with_adapters())
    assert [twins.compare(given, policy_and_reference) for given in BATCHES] == [0, 2, 2, 2, 2]


def test_adapters_that_are_merged():
    """PEFT changes a list of each layer in place. A replay would count the adapters twice."""

    def evaluated(model, given):
        with torch.no_grad():
            return run(model, given)

    twins = Twins(with_adapters())
    for change in (
        lambda model: model.eval(),
        lambda model: model.merge_adapter(),
        lambda model: model.unmerge_adapter(),
    ):
        twins.change(change)
        assert [twins.compare(given, evaluated) for given in BATCHES][-1] == 1


def test_adapters_that_are_switched():
    """Both are recorded once."""
    twins = Twins(with_adapters())
    for model in twins.models:
        model.add_adapter("other", LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4))
    torch.manual_seed(0)
    for pair in zip(*(model.parameters() for model in twins.models), strict=True):
        pair[1].data.copy_(pair[0].data.normal_(std=0.1))
    found = []
    for i in range(12):
        twins.change(lambda model, name=("default", "other")[i // 2 % 2]: model.set_adapter(name))
        found.append(twins.compare(BATCHES[i % 5]))
    assert found == [0, 1, 0, 1] + 8 * [1]


def test_a_batch_that_needs_more_room():
    """It runs the layers, and the next one is recorded with more room."""
    twins = Twins(llama())
    many = batch(*[(1, 1, 1)] * 14)
    assert [twins.compare(given) for given in (*BATCHES[:2], many, BATCHES[2], many, BATCHES[3])] == [0, 1, 0, 1, 1, 1]


def dropout():
    return with_adapters(lora_dropout=0.5).train()


def changed():
    model = llama()
    mlp = model.model.layers[1].mlp
    mlp.forward = MethodType(type(mlp).forward, mlp)
    return model


def checkpointed_otherwise():
    model = checkpointed(False)
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = lambda function, *args: function(*args)
    return model.train()


class Reading(torch.nn.Module):
    """Reads a value on the host, as some routers do."""

    def forward(self, x):
        return x * float(x.detach().abs().max() >= 0)


def with_activation(activation):
    model = llama()
    model.model.layers[0].mlp.act_fn = activation
    return model


REASONS = {
    "dropout": (dropout, r"LlamaForCausalLM draws random numbers \[graphs-model\]"),
    "forward": (changed, "LlamaMLP, or one of its parameters, has hooks"),
    "checkpointing": (checkpointed_otherwise, "LlamaDecoderLayer, or one of its parameters, has hooks"),
    "mixers": (lambda: tiny_family("lfm2", WORDS), "Lfm2ForCausalLM mixes tokens outside of its attention"),
    "positions": (
        lambda: llama(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)),
        "LlamaForCausalLM has rotary embeddings that depend on the width of a batch",
    ),
    "value": (
        lambda: with_activation(Reading()),
        r"the model cannot be recorded: \w+: (CUDA error: )?operation not permitted",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name, caplog):
    make, expected = REASONS[name]
    twins = Twins(make())

    def seeded(model, given):
        torch.manual_seed(0)
        return step(model, given)

    assert [twins.compare(given, seeded) for given in BATCHES[:3]] == [0, 0, 0]
    (line,) = [x for x in caplog.messages if "no CUDA graphs" in x and "graphs-device" not in x]
    assert re.search(expected, line)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # neither the allocator nor the current stream is left as during a capture
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    other = Twins(llama())
    assert [other.compare(given) for given in BATCHES[:2]] == [0, 1]


def double(gradient):
    return 2 * gradient


def halve(weight):
    weight.grad /= 2


@pytest.mark.parametrize("hook", [double, halve], ids=["of gradients", "after their accumulation"])
def test_hooks_of_parameters(caplog, hook):
    """The first ones would run in the recording, too. Engines rely on the order in which the others run."""
    twins = Twins(llama())
    register = "register_hook" if hook is double else "register_post_accumulate_grad_hook"
    twins.change(lambda model: getattr(model.model.norm.weight, register)(hook))
    assert [twins.compare(given) for given in BATCHES[:3]] == [0, 0, 0]
    assert "LlamaForCausalLM, or one of its parameters, has hooks" in caplog.text


@pytest.mark.parametrize("seen", [1, 2])
def test_a_hook_of_a_parameter_that_comes_late(caplog, seen):
    """It runs on what a replay returns. Nothing is recorded with it."""
    twins = Twins(llama())
    assert [twins.compare(given) for given in BATCHES[:seen]] == [0, 1][:seen]
    twins.change(lambda model: model.model.norm.weight.register_hook(double))
    assert [twins.compare(given) for given in BATCHES[2:]] == [seen - 1] * 3
    assert ("LlamaModel, or one of its parameters, has hooks" in caplog.text) == (seen == 1)


def test_activations_that_other_code_keeps(caplog):
    twins = Twins(llama())

    def offloading(model, given):
        with torch.autograd.graph.save_on_cpu():
            return step(model, given)

    assert [twins.compare(given, offloading) for given in BATCHES[:3]] == [0, 0, 0]
    assert "other code replaces the activations that autograd keeps [graphs-activations]" in caplog.text
    assert [twins.compare(given) for given in BATCHES[:3]] == [0, 1, 1]


def test_rows_that_a_recording_does_not_read(caplog, monkeypatch):
    """As those of a backend that has read the first ones on the host."""
    monkeypatch.setattr(routes, "refill", lambda *_: True)
    twins = Twins(llama())
    assert [twins.compare(given) for given in BATCHES[:3]] == [0, 0, 0]
    assert "from the layers in relation to their values, more than rounding explains [graphs-differ]" in caplog.text


def test_attention_without_a_backend(caplog, monkeypatch):
    monkeypatch.delenv("FASTDPO_ATTENTION", raising=False)
    monkeypatch.setattr(routes, "BACKENDS", {})
    twins = Twins(llama())
    assert [twins.compare(given) for given in BATCHES[:3]] == [0, 0, 0]
    assert "packed attention runs as plain matrix products [graphs-attention]" in caplog.text


@pytest.mark.parametrize("at", [1, 2], ids=["forward", "backward"])
def test_no_memory_for_a_recording(recorder, caplog, at):
    """Parameters, gradients and random state stay as they are, and the training goes on."""
    recorder.fails_at = at
    twins = Twins(llama())
    twins.compare(BATCHES[0])
    states = [torch.get_rng_state(), *twins.models[0].parameters(), *gradients(twins.models[0]).values()]
    copies = [x.detach().clone() for x in states]
    loss_of(twins.models[0], BATCHES[1])
    assert "the device has no memory for a recording of 48 tokens [graphs-memory]" in caplog.text
    left = [torch.get_rng_state(), *twins.models[0].parameters(), *gradients(twins.models[0]).values()]
    assert all(map(torch.equal, left, copies))
    assert [twins.compare(given) for given in BATCHES] == [0] * 5
    assert not recorder.recordings


def test_the_oldest_recording_goes(monkeypatch, recorder):
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    model = fastdpo.prepare(llama())
    sizes = [batch((16 * n + 3, 1, 1)) for n in range(3)]
    for given in [*sizes, *sizes]:
        run(model, given)
    gc.collect()
    assert (replays(), len(recorder.recordings)) == (3, 2)
    assert copy.deepcopy(model.__dict__["_fastdpo_forward"].runner) is not None
    run(model, sizes[0])
    gc.collect()
    assert (replays(), len(recorder.recordings)) == (4, 2)
    fastdpo.restore(model)
    gc.collect()
    assert not recorder.recordings
