"""When a model is examined, in which order, and what that leaves behind."""

import functools
import gc
import random
from collections import Counter, deque
from types import MethodType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from peft import LoraConfig, VeloraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import fastdpo
from fastdpo.models import forward
from fastdpo.models.examine import probe
from fastdpo.models.examine.examination import FREE_EXAMINATIONS
from fastdpo.models.examine.snapshot import restored
from fastdpo.models.running import compiled
from fastdpo.models.state import state_of
from tests.integrations.test_custom_loops import own_logps
from tests.support.kernels import recorder
from tests.support.models.planted import Counted, Scaled, Wrapped, in_layers
from tests.support.models.trained_effects import compressed_activations
from tests.support.trl.dpo import LORA, tiny_model, trained_adapter

IDS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 10, 11]])
LABELS = torch.tensor([[-100, -100, -100, 8, 9], [-100, -100, -100, 10, 11]])


def scored(model):
    """The path of a call, whose gradients are computed where there are any."""
    before = Counter(fastdpo.calls)
    sums = fastdpo.score(model, IDS, labels=LABELS).sums().sum()
    if sums.requires_grad:
        sums.backward()
    ((_, _, path),) = fastdpo.calls - before
    return path


referred = torch.no_grad()(scored)


@pytest.fixture
def probed(monkeypatch):
    models, own = [], probe.probe
    monkeypatch.setattr(probe, "probe", lambda model, *rest: models.append(model) or own(model, *rest))
    return models


def with_compressed_activations(model):
    compressed_activations(model)
    return model


def test_gradients_are_examined_though_a_reference_was_called_first(probed):
    model = trained_adapter(with_compressed_activations(tiny_model()))
    model.base_model.model.model.layers[0].mlp.up_proj.inner.weight.requires_grad_(True)
    fastdpo.prepare(model.train())
    with model.disable_adapter():
        model.requires_grad_(False)
        assert referred(model) == "fused"
    model.set_adapter("default")
    model.base_model.model.model.layers[0].mlp.up_proj.inner.weight.requires_grad_(True)
    assert scored(model) == "stock"
    assert len(probed) == 2


def test_a_policy_that_was_examined_is_not_examined_as_its_own_reference(probed):
    model = fastdpo.prepare(trained_adapter(tiny_model()).train())
    for _ in range(2):
        assert scored(model) == "fused"
        with model.disable_adapter():
            assert referred(model) == "fused"
    assert len(probed) == 1


def test_gradients_of_parameters_that_are_unfrozen_are_examined(probed):
    model = with_compressed_activations(tiny_model()).train()
    weights = [layer.mlp.up_proj.inner.weight for layer in model.model.layers]
    for weight in weights:
        weight.requires_grad_(False)
    fastdpo.prepare(model)
    assert [scored(model), scored(model)] == ["fused", "fused"]
    for weight in weights:
        weight.requires_grad_(True)
    assert scored(model) == "stock"
    assert len(probed) == 2


@pytest.mark.parametrize("first", ["policy", "reference"])
def test_policy_and_reference_of_equal_code_run_alike(first):
    gc.collect()  # models of other tests have this code
    policy = fastdpo.prepare(with_compressed_activations(tiny_model()).train())
    reference = fastdpo.prepare(with_compressed_activations(tiny_model(seed=1)).eval().requires_grad_(False))
    if first == "reference":
        assert referred(reference) == "fused", "nothing is known yet"
    assert scored(policy) == "stock"
    assert referred(reference) == "stock"
    other = fastdpo.prepare(tiny_model(seed=2).eval())
    assert referred(other) == "fused", "of other code"


def test_a_model_that_has_diverged_tells_nothing_of_others(caplog):
    diverged = fastdpo.prepare(tiny_model().train())
    torch.nn.init.constant_(diverged.model.norm.weight, float("nan"))
    assert scored(diverged) == "stock"
    assert "the hidden states of LlamaForCausalLM are not finite" in caplog.text
    assert scored(fastdpo.prepare(tiny_model(seed=1).train())) == "fused"


def test_a_model_that_changes_at_each_step_is_not_examined_at_each(probed):
    model = fastdpo.prepare(tiny_model().train())
    attention = model.model.layers[0].self_attn
    paths = []
    for step in range(24):
        attention.scaling = 0.3 + step / 64
        paths.append(scored(model))
    assert len(probed) == FREE_EXAMINATIONS
    assert paths == ["fused"] * 24


def test_a_model_with_other_modules_in_each_step_is_examined_once_it_stays(probed):
    model = fastdpo.prepare(tiny_model().train())
    paths = []
    for _ in range(FREE_EXAMINATIONS + 4):
        model.model.layers[0].mlp.act_fn = type("SiLU", (torch.nn.SiLU,), {})()
        paths.append(scored(model))
    assert len(probed) == FREE_EXAMINATIONS
    assert paths == ["fused"] * FREE_EXAMINATIONS + ["stock"] * 4
    assert scored(model) == "fused"  # again with the same modules
    assert len(probed) == FREE_EXAMINATIONS + 1


def test_a_model_that_keeps_state_is_examined_once(probed):
    model = tiny_model().train()
    in_layers(Counted)(model)
    fastdpo.prepare(model)
    assert {scored(model) for _ in range(8)} == {"stock"}
    assert len(probed) == 1
    assert [layer.mlp.count for layer in model.model.layers] == [8] * len(model.model.layers)


@pytest.mark.parametrize("options", [dict(compile=x) for x in (False, True, "auto")], ids=str)
def test_a_hook_on_every_module_that_comes_late(options, monkeypatch):
    """It sees what it sees in the model itself, also where layers were compiled or a batch was recorded."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    recorder.install(monkeypatch)
    model, seen = tiny_model().train(), []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    model(input_ids=IDS, use_cache=False)
    handle.remove()
    expected, paths = seen[:], []
    fastdpo.prepare(model, **options)
    for watches in (False, False, False, True, False):
        before = fastdpo.calls.copy()
        handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
        if not watches:
            handle.remove()
        seen.clear()
        fastdpo.score(model, IDS, labels=LABELS).sums().sum().backward()
        handle.remove()
        paths.append({key[2] for key in fastdpo.calls - before})
        assert seen == expected * watches
    assert ("replayed" in paths[2]) == (options["compile"] is not False)
    assert ["fused" in x for x in paths] == [True, True, True, False, True]


def recorded_states(model):
    model(input_ids=IDS, output_hidden_states=True, use_cache=False)
    return model


def on_a_device(model):
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    return model


KNOWN_HOOKS = {
    "transformers, for hidden states": recorded_states,
    "accelerate": on_a_device,
    "PEFT": lambda model: prepare_model_for_kbit_training(get_peft_model(model, LoraConfig(**LORA))),
}


@pytest.mark.parametrize("first", [False, True], ids=["later", "before"])
@pytest.mark.parametrize("name", KNOWN_HOOKS)
def test_hooks_of_libraries_leave_a_model_fused(name, first):
    """Those of engines are in tests/ranks."""
    model, hook = fastdpo.prepare(tiny_model().train()), KNOWN_HOOKS[name]
    paths = [] if first else [scored(model)]
    model = hook(model).requires_grad_(True)
    paths += [scored(model), scored(model)]
    assert set(paths) == {"fused"}


@pytest.mark.parametrize("init_type", ["batch_average_once", "batch_average"])
def test_adapters_that_calibrate(init_type):
    """VeLoRA replaces a buffer in its first call, or in each, by what it makes of the activations."""
    config = VeloraConfig(init_type=init_type, num_groups=4)
    gradients = []
    for prepares in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(tiny_model(), LoraConfig(**LORA, velora_config=config)).train()
        if prepares:
            fastdpo.prepare(model)
            assert scored(model) == "stock"
        else:
            own_logps(model, IDS, torch.ones_like(IDS), LABELS).sum().backward()
        gradients.append([x.grad for x in model.parameters() if x.grad is not None])
    assert gradients[0]
    torch.testing.assert_close(*gradients)


def test_a_model_of_few_positions_is_examined():
    assert scored(fastdpo.prepare(tiny_model(max_position_embeddings=8))) == "fused"


def test_what_a_dictionary_holds_is_looked_at(probed):
    model = tiny_model().train()
    in_layers(Scaled)(model)
    fastdpo.prepare(model)
    assert [scored(model), scored(model)] == ["fused"] * 2
    model.model.layers[0].mlp.scales["mlp"] = 2.0
    assert [scored(model), scored(model)] == ["fused"] * 2
    assert len(probed) == 2


class Drawing(nn.Module):
    """Draws from Python's and NumPy's generators, and does not use it."""

    def forward(self, hidden):
        return hidden + 0.0 * (random.random() + np.random.rand())  # noqa: NPY002


def states():
    return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002


def test_random_numbers_are_drawn_as_before():
    model = tiny_model().train()
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Drawing())
    fastdpo.prepare(model)
    state = state_of(model)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = states()
    assert state.examine(model, state, torch.device("cpu")) is None
    assert states() == expected


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.number, self.names, self.record = 1, ["a"], type("Record", (), {})()
        self.record.table = {"x": [1, 2]}
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.plain, self.same = torch.ones(2), (1, 2)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self):
        self.number += 1
        self.names.append("b")
        self.record.table["x"][0] = 7
        self.written.add_(1)
        self.replaced = torch.ones(2)
        self.plain.mul_(2)
        self.new = "attribute"
        self.same = (*self.same,)
        torch.rand(3, generator=self.generator)


def test_a_snapshot_restores_and_names_what_changed():
    module = nn.Sequential(Stateful())
    (inner,) = module
    written, replaced, state = inner.written, inner.replaced, inner.generator.get_state()
    with restored(module) as changed:
        inner()
    assert set(changed) == {f"0.{x}" for x in ("number", "names", "record", "written", "replaced", "plain", "new")}
    assert (inner.number, inner.names, inner.record.table) == (1, ["a"], {"x": [1, 2]})
    assert inner.written is written
    assert inner.replaced is replaced
    assert written.tolist() == replaced.tolist() == [0, 0]
    assert inner.plain.tolist() == [1, 1]
    assert not hasattr(inner, "new")
    assert torch.equal(inner.generator.get_state(), state)
    with restored(module) as changed:
        pass
    assert changed == []


KEPT: list = []
LATEST = None
NOTES = SimpleNamespace(latest=None)


class Keeps(ModelHook):
    def post_forward(self, module, output):
        KEPT.append(output)
        return output


class KeepsArguments(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        KEPT.append(args[0])
        return args, kwargs


def by_hooks(*hooks):
    return lambda mlp: add_hook_to_module(mlp, SequentialHook(*hooks) if len(hooks) > 1 else hooks[0])


def by_a_closure(mlp, wraps=lambda function: function):
    own = mlp.forward

    def forward(x):
        KEPT.append(own(x))
        return KEPT[-1]

    mlp.forward = wraps(forward)


def method(self, x):
    KEPT.append(type(self).forward(self, x))
    return KEPT[-1]


def by_a_partial(mlp):
    mlp.forward = functools.partial(method, mlp)


def by_a_method(mlp):
    mlp.forward = MethodType(method, mlp)


class AutogradFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mlp, hidden):
        return method(mlp, hidden)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def by_an_autograd_function(mlp):
    mlp.forward = functools.partial(AutogradFunction.apply, mlp)


def by_wrapping_an_engine(mlp):
    add_hook_to_module(mlp, AlignDevicesHook(execution_device="cpu"))
    by_a_closure(mlp)


ATTACHED = {
    "hook of accelerate": by_hooks(Keeps()),
    "hook of accelerate before calls": by_hooks(KeepsArguments()),
    "several hooks of accelerate": by_hooks(AlignDevicesHook(), Keeps()),
    "closure": by_a_closure,
    "decorated closure": functools.partial(by_a_closure, wraps=torch.autocast("cpu", enabled=False)),
    "partial": by_a_partial,
    "method": by_a_method,
    "autograd function": by_an_autograd_function,
    "around an engine's": by_wrapping_an_engine,
}


@pytest.mark.parametrize("first", [False, True], ids=["later", "before"])
@pytest.mark.parametrize("name", ATTACHED)
def test_what_is_attached_to_a_layer_sees_rows(name, first, caplog):
    KEPT.clear()
    model = tiny_model().train()
    if not first:
        assert scored(fastdpo.prepare(model)) == "fused"
    ATTACHED[name](model.model.layers[0].mlp)
    fastdpo.prepare(model)
    assert [scored(model), scored(model)] == ["stock", "stock"]
    assert [x.shape[:2] for x in KEPT] == 2 * [IDS.shape]
    assert "[user-hooks]" in caplog.text


def closing_over(keep):
    class Closing(Wrapped):
        def forward(self, x):
            return keep(self.inner(x))

    return Closing


def closing_over_a_variable():
    latest = None

    class Closing(Wrapped):
        def forward(self, x):
            nonlocal latest
            latest = self.inner(x)
            return latest

    return Closing, lambda: latest


def kept(x):
    KEPT.append(x)
    return x


class OfAGlobalList(Wrapped):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        KEPT.append(self.inner(x))
        return KEPT[-1]


class OfAGlobalVariable(Wrapped):
    def forward(self, x):
        global LATEST
        LATEST = self.inner(x)
        return LATEST


class OfItsClass(Wrapped):
    latest = None
    outputs: ClassVar[deque] = deque()

    def forward(self, x):
        OfItsClass.latest = self.inner(x)
        self.outputs.append(self.latest)
        return self.latest


class OfADefault(Wrapped):
    def forward(self, x, outputs=KEPT):
        outputs.append(self.inner(x))
        return outputs[-1]


class OfANamespace(Wrapped):
    def forward(self, x):
        NOTES.latest = self.inner(x)
        return NOTES.latest


class OfNorms(Wrapped):
    def forward(self, x):
        KEPT.append(float(x.detach().norm()))
        return self.inner(x)


Closing, latest_of_closing = closing_over_a_variable()

OUTSIDE = {
    "list of the file": (OfAGlobalList, lambda: KEPT),
    "variable of the file": (OfAGlobalVariable, lambda: [LATEST]),
    "attribute of the class": (OfItsClass, lambda: [OfItsClass.latest, *OfItsClass.outputs]),
    "default": (OfADefault, lambda: KEPT),
    "namespace": (OfANamespace, lambda: [NOTES.latest]),
    "numbers": (OfNorms, lambda: KEPT),
    "function that is closed over": (closing_over(kept), lambda: KEPT),
    "method of a list that is closed over": (closing_over(lambda x: KEPT.append(x) or x), lambda: KEPT),
    "variable that is closed over": (Closing, lambda: [latest_of_closing()]),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_layer_keeps_outside_of_it(name, monkeypatch, caplog):
    """Nothing of the probe is left there, and calls of the trainer's own path follow."""
    KEPT.clear()
    kind, present = OUTSIDE[name]
    model = tiny_model().train()
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp)
    fastdpo.prepare(model)
    before = [*present()]
    seen, own = [], forward.prior_output
    monkeypatch.setattr(forward, "prior_output", lambda *args: seen.append([*present()]) or own(*args))
    assert [scored(model), scored(model)] == ["stock", "stock"]
    assert len(seen[0]) == len(before)
    assert all(x is y for x, y in zip(seen[0], before, strict=True)), "as before the probe"
    assert {x.shape[:2] for x in present() if isinstance(x, torch.Tensor)} <= {IDS.shape}
    assert "[keeps-state]" in caplog.text
