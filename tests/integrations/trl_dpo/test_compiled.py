"""`patch(compile=True)`: the same training by compiled layers, whose graphs hold for batches of all lengths."""

import copy
import logging
import pickle

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TrainerCallback
from trl import DPOTrainer

import fastdpo
from fastdpo.models.running import compiled
from fastdpo.models.state import state_of
from tests.integrations.test_custom_loops import gradients, rows
from tests.support.comparison import (
    assert_close,
    assert_same_gradients,
    assert_same_in_low_precision,
    assert_trained_alike,
)
from tests.support.models.families import HYBRID, tiny_family
from tests.support.models.watching import change
from tests.support.trl.dpo import (
    DPO,
    adapter,
    assert_fused,
    assert_same,
    long_pairs,
    tiny_model,
    train,
)
from tests.support.trl.vision import train_vision_both

LENGTHS = [(8, 4, 3), (3, 1, 1), (1, 1, 2), (20, 12, 16), (4, 28, 16), (1, 63, 2)]  # one scored token; remainders by 16
LENGTHS += [(5 + i % 9, 1 + i % 7, 1 + i % 11) for i in range(43)] + [(60, 70, 55)]  # a new longest row


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch):
    """Counts graphs from 0, of a backend that runs them as they are, and forgets that a trainer compiled its model."""
    AcceleratorState._reset_state()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(compiled, "BACKEND", "eager")


GRAPHS = dict.fromkeys(("llama", "qwen2", "qwen3", "phi3", "qwen3_moe", "mixtral"), 2)
GRAPHS |= dict.fromkeys(("qwen2-window", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"), 4)
GRAPHS |= {"lfm2": "compiled-mixers"}
"""By family, the graphs of a training, two for each kind of layer, or the reason why there are none."""
OFTEN = ("gemma3_text", "qwen3_moe", "lfm2")


def graphs() -> int:
    """The number of graphs that torch has made since the test began."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def messages(caplog) -> list[str]:
    return [x.message for x in caplog.records if x.name == "fastdpo" and "compil" in x.message]


class Generate(TrainerCallback):
    """Generates after each 25th step, and notes whether a graph was made."""

    def __init__(self):
        self.graphs: set[int] = set()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % 25 == 0:
            before = graphs()
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
            self.graphs.add(graphs() - before)


@pytest.mark.parametrize(("lora", "number"), [(False, 2), (True, 3 + 2)], ids=["full", "LoRA"])
def test_graphs_of_50_batches(tmp_path, caplog, lora, number):
    """With LoRA, the first layer has a graph of its own, and so have the two calls of an evaluation."""
    options = dict(per_device_train_batch_size=1, per_device_eval_batch_size=3, eval_strategy="steps", eval_steps=24)
    options |= dict(max_steps=50, save_strategy="steps", save_steps=30, learning_rate=1e-4)

    def trainer(stop: int) -> DPOTrainer:
        adapters = dict(peft_config=adapter()["peft_config"]) if lora else dict(reference=tiny_model(seed=1).eval())
        given = options | adapters | dict(max_steps=stop, callbacks=[generating])
        return DPO.build(tmp_path, tiny_model(), data=long_pairs(tuple(LENGTHS)), evaluate=6, **given)

    generating = Generate()
    with caplog.at_level(logging.INFO, "fastdpo"), fastdpo.patched("trl.DPOTrainer", compile=True):
        trainer(30).train()
        trainer(50).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-30"))
    assert graphs() == number
    assert generating.graphs == {0}
    assert not torch._dynamo.utils.counters["graph_break"]
    policy = [x.removeprefix("fastdpo: trl.DPOTrainer (policy): ") for x in messages(caplog) if "(policy)" in x]
    assert policy[0] == "compiling its layers; the first step waits for them"
    assert policy[1].startswith("compiling its layers took ")


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["kept", "reentrant", "not reentrant"])
@pytest.mark.parametrize("options", [{}, adapter(), dict(bf16=True)], ids=["full", "LoRA", "autocast"])
def test_same_training(both, monkeypatch, options, checkpointing):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    given = dict(gradient_checkpointing_kwargs=dict(use_reentrant=checkpointing)) if checkpointing is not None else {}
    options = options | given | dict(gradient_checkpointing=checkpointing is not None, max_steps=2, evaluate=4)
    stock, patched = both(compile=True, **options)
    if "bf16" in options:
        assert_same_in_low_precision(stock, patched, torch.bfloat16, stock.in_float64)
    else:
        assert_same(stock, patched)
    assert_fused(patched, policy=2, reference=3, eval=1)
    assert graphs() > 1


def test_graphs_that_are_differentiated_again(monkeypatch):
    """torch would let a backward write to the activations of its graph. Functions of others keep that."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    others = torch.compile(lambda x: (x.sin() @ x).cos(), backend="aot_eager")

    def gradients_of(model):
        batch, trained = rows(), [*model.parameters()]
        sums = fastdpo.score(model, **batch).sums()
        found = [torch.autograd.grad(x, trained, retain_graph=True) for x in (sums[0], sums[1], sums.sum())]
        return [x for each in (*found, torch.autograd.grad(sums.sum(), trained)) for x in each]

    expected = gradients_of(fastdpo.prepare(tiny_model()))
    model = fastdpo.prepare(tiny_model(), compile=True)
    for a, b in zip(gradients_of(model), expected, strict=True):
        assert_close(a, b)
    assert graphs() == 1
    others(torch.ones(3, 3, requires_grad=True)).sum().backward()
    with pytest.raises(RuntimeError, match="donated buffers"):
        others(torch.ones(3, 3, requires_grad=True)).sum().backward(retain_graph=True)
    fastdpo.restore(model)


def with_wrong_code(graph, inputs):
    """A backend whose layers return what is wrong by a thousandth."""
    return lambda *args: [1.001 * x if x.is_floating_point() else x for x in graph.forward(*args)]


def test_compiled_layers_are_verified(both, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "fastdpo"):
        stock, patched = both(compile=True, verify=True)
    assert_same(stock, patched)
    assert len([x for x in caplog.messages if "verified with its compiled layers; differs in log-prob" in x]) == 2
    monkeypatch.setattr(compiled, "BACKEND", with_wrong_code)
    with pytest.raises(fastdpo.VerificationError, match="log-probabilities by"):
        both(compile=True, verify=True)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, adapter()], ids=["full", "LoRA"])
def test_generated_code(both, monkeypatch, options):
    """No further from a training in float64 than layers that are not compiled."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    assert_trained_alike(both(compile=True, **options), policy=3, reference=3)
    assert graphs() > 1


def test_late_graphs_are_logged(caplog):
    model, batch = fastdpo.prepare(tiny_model(), compile=True), rows()
    with caplog.at_level(logging.INFO, "fastdpo"):
        for i in range(5):
            if i == 3:
                torch._dynamo.reset()
            fastdpo.score(model, **batch)
    first, *times = (x.partition("): ")[2] for x in messages(caplog))
    assert first == "compiling its layers; the first step waits for them"
    assert len(times) == 2
    assert all(x.startswith("compiling its layers took ") for x in times)
    fastdpo.restore(model)


def test_weights_that_are_unfrozen_get_gradients(monkeypatch):
    """torch 2.11 would skip the check of what is trained."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    model = tiny_model()
    ids, weights = torch.arange(3, 15).view(2, 6), [layer.mlp.up_proj.weight for layer in model.model.layers]
    fastdpo.prepare(model, compile=True)
    for trained in (False, True):
        for x in weights:
            x.requires_grad_(trained)
        for _ in range(2):
            fastdpo.score(model, ids, torch.ones_like(ids), ids).sums().sum().backward()
        assert [x.grad is not None for x in weights] == [trained] * len(weights)
    fastdpo.restore(model)


def test_settings_hold_while_layers_are_compiled():
    """Also after a reset, which makes torch forget who listens, and not for functions of others."""
    seen, ids = [], torch.arange(3, 15).view(2, 6)

    def backend(graph, inputs):
        seen.append([getattr(torch._dynamo.config, name, value) for name, value in compiled.CONFIG.items()])
        return graph.forward

    model, others = fastdpo.prepare(tiny_model(), compile=True), torch.compile(torch.sin, backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "BACKEND", backend)
        for _ in range(2):
            torch._dynamo.reset()
            others(torch.ones(3))
            fastdpo.score(model, ids, torch.ones_like(ids), ids)
    own = [*compiled.CONFIG.values()]
    assert [x == own for x in seen] == [False, True] * 2
    fastdpo.restore(model)


class Broken(torch.nn.SiLU):
    """An activation that ends a graph."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def broken(model):
    model.model.layers[1].mlp.act_fn = Broken()
    return model


def changed(model):
    change(model.model.layers[1].mlp, lambda output: 2 * output)
    return model


FALLBACKS = {
    "break": (dict(prepare=broken), "compiled-error"),
    "forward": (dict(prepare=changed), "compiled-hooks"),
    "mixers": (dict(kind="lfm2", tiny=HYBRID["lfm2"][1]), "compiled-mixers"),
    "torch_compile": (dict(torch_compile=True, torch_compile_backend="eager"), "compiled-already"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_layers_that_are_not_compiled_have_one_reason(both, caplog, case):
    options, reason = FALLBACKS[case]
    with caplog.at_level(logging.WARNING, "fastdpo"):
        stock, patched = both(compile=True, max_steps=2, **options)
    assert_trained_alike((stock, patched), policy=2, reference=2)
    for role in ("policy", "reference"):
        (line,) = (x for x in messages(caplog) if f"({role})" in x)
        assert line.startswith(f"fastdpo: trl.DPOTrainer ({role}): layers not compiled, ")
        assert line.endswith(f"[{reason}]")


def test_strict_mode_raises_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with fastdpo.patched("trl.DPOTrainer", compile=True), pytest.raises(fastdpo.NotFused, match="compiled-error"):
        train(tmp_path, broken(tiny_model()), tiny_model(seed=1))


def test_unpatching_and_copies_have_stock_layers(tmp_path):
    model = tiny_model()
    before = [{*vars(layer)} for layer in model.model.layers]
    with fastdpo.patched("trl.DPOTrainer", compile=True):
        train(tmp_path, model, tiny_model(seed=1), max_steps=1)
        assert all("_compiled_call_impl" in vars(layer) for layer in model.model.layers)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [{*vars(layer)} for layer in twin.model.layers] == before
        assert b"fastdpo" not in pickle.dumps(model)
    assert [{*vars(layer)} for layer in model.model.layers] == before


def scores(model, **inputs) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities of batches of two lengths, with gradients and without, and the gradients."""
    results = []
    for length in (12, 11):
        batch = {name: x[:, :length] for name, x in rows().items()} | inputs
        results += [fastdpo.score(model, **batch).logps]
        with torch.no_grad():
            fastdpo.score(model, **batch)
    sum(x.sum() for x in results).backward()
    return [x.detach() for x in results], gradients(model)


@pytest.mark.parametrize("name", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.thorough) for x in GRAPHS])
def test_families(name):
    model = tiny_family(name).train()
    expected = scores(fastdpo.prepare(model))
    found = scores(fastdpo.prepare(model, compile=True))
    for a, b in zip(found[0], expected[0], strict=True):
        assert_close(a, b)
    assert_same_gradients([found[1]], [expected[1]])
    reason = state_of(model).runner.compiled.reason
    assert (graphs() if reason is None else reason.name) == GRAPHS[name]
    fastdpo.restore(model)
    assert not any("_compiled_call_impl" in vars(x) for x in model.modules())


def test_images(tmp_path):
    """The language model is compiled, and its tower runs as it is."""
    assert_trained_alike(train_vision_both(tmp_path, "llava", compile=True), policy=2, reference=2)
    assert graphs() == 2
