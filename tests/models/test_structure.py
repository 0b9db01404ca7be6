"""A change of a model changes its structure's hash, by whichever way the change was written."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from fastdpo.models import compiled, forward
from fastdpo.models.state import ForwardOptions, state_of
from fastdpo.models.structure import Structure
from tests.support.models.surgeries import MixesTokensWeight
from tests.support.trl.dpo import tiny_model, trained_adapter


def mlp_of(model: PreTrainedModel) -> nn.Module:
    return model.model.layers[0].mlp


def double(module, args, output):
    return output * 2


def child_written(model):
    model.model.layers[0]._modules["mlp"] = nn.Identity()


def child_removed(model):
    model.model.layers[0]._modules["mlp"] = None


def child_added_to_a_leaf(model):
    mlp_of(model).act_fn._modules["inner"] = nn.Identity()


def child_renamed(model):
    children = model.model.layers[0]._modules
    children["feed_forward"] = children.pop("mlp")


def children_reordered(model):
    children = model.model.layers._modules
    children["0"] = children.pop("0")


def children_replaced_by_a_dictionary_in_another_order(model):
    vars(model.model.layers)["_modules"] = dict(reversed(model.model.layers._modules.items()))


def child_of_the_model(model):
    model._modules["model"] = tiny_model(seed=3).model


def attribute_written(model):
    vars(mlp_of(model))["scale"] = 2.0


def attribute_removed(model):
    del vars(mlp_of(model))["hidden_size"]


def attribute_changed(model):
    vars(model.model.layers[0].self_attn)["scaling"] = 0.5


def attribute_renamed(model):
    attributes = vars(mlp_of(model))
    attributes["size"] = attributes.pop("hidden_size")


def attributes_replaced(model):
    mlp = mlp_of(model)
    mlp.__dict__ = {**vars(mlp), "scale": 2.0}


def forward_written(model):
    stock = mlp_of(model).forward
    vars(mlp_of(model))["forward"] = lambda hidden: stock(hidden) * 2


def hook_written(model):
    mlp_of(model)._forward_hooks[10**6] = double


def hooks_replaced(model):
    vars(mlp_of(model))["_forward_pre_hooks"] = OrderedDict({0: lambda module, args: args})


def backward_hook_written(model):
    mlp_of(model)._backward_hooks[10**6] = lambda module, inputs, outputs: None


def parameter_of_another_class(model):
    weights = mlp_of(model).down_proj._parameters
    weights["weight"] = weights["weight"].detach().as_subclass(MixesTokensWeight)


def parameter_of_another_dtype(model):
    weights = model.model.norm._parameters
    weights["weight"] = nn.Parameter(weights["weight"].detach().double())


def parameter_added(model):
    mlp_of(model).down_proj._parameters["bias"] = nn.Parameter(torch.zeros(1))


def buffer_of_another_dtype(model):
    buffers = model.model.rotary_emb._buffers
    buffers["inv_freq"] = buffers["inv_freq"].double()


def class_changed(model):
    mlp_of(model).__class__ = type("Other", (type(mlp_of(model)),), {})


def attention_changed(model):
    model.set_attn_implementation("eager")


CHANGES = [
    *(child_written, child_removed, child_added_to_a_leaf, child_renamed, children_reordered),
    *(children_replaced_by_a_dictionary_in_another_order, child_of_the_model),
    *(attribute_written, attribute_removed, attribute_changed, attribute_renamed, attributes_replaced),
    *(parameter_of_another_class, parameter_of_another_dtype, parameter_added, buffer_of_another_dtype),
    *(forward_written, hook_written, hooks_replaced, backward_hook_written, class_changed, attention_changed),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen(change: Callable):
    model, structure = tiny_model(), Structure()
    before = structure.identity(model).hash
    assert structure.identity(model).hash == before
    change(model)
    assert structure.identity(model).hash != before
    assert structure.identity(model).hash == Structure().identity(model).hash, "as if seen for the first time"


def test_a_hook_in_a_registry_that_replaced_an_equal_one_is_seen():
    model, structure = tiny_model(), Structure()
    before = structure.identity(model).hash
    vars(mlp_of(model))["_forward_hooks"] = OrderedDict()
    assert structure.identity(model).hash == before
    mlp_of(model)._forward_hooks[0] = double
    assert structure.identity(model).hash != before


@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(1)), "scale"], ids=["parameter", "other"])
def test_a_value_in_a_dictionary_of_parameters_that_was_empty_is_seen(value):
    model, structure = tiny_model(), Structure()
    mlp_of(model).parameters_of_adapters = nn.ParameterDict()
    before = structure.identity(model).hash
    mlp_of(model).parameters_of_adapters["default"] = value
    assert structure.identity(model).hash != before


def test_a_value_that_a_hook_closes_over_is_seen():
    model, structure, factor = tiny_model(), Structure(), 2.0

    def scale(module, args, output):
        return output * factor

    mlp_of(model).register_forward_hook(scale)
    before = structure.identity(model).hash
    factor = 3.0
    assert structure.identity(model).hash != before


def test_a_change_that_is_undone_leads_back():
    model, structure = tiny_model(), Structure()
    before = structure.identity(model).hash
    hook = mlp_of(model).register_forward_hook(double)
    changed = structure.identity(model).hash
    hook.remove()
    assert structure.identity(model).hash == before != changed


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_disabled_adapters_are_no_change(training):
    model = trained_adapter(tiny_model())
    base, structure = model.get_base_model(), Structure()
    before = structure.identity(base).hash
    for _ in range(3):
        model.train(training)
        assert structure.identity(base).hash == before
        with model.disable_adapter():
            assert structure.identity(base).hash == before


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_call_of_an_unchanged_model_does_not_walk_it(monkeypatch, adapter, compiles):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    model = trained_adapter(tiny_model()) if adapter else tiny_model()
    base = model.get_base_model() if adapter else model
    options = ForwardOptions("test", "policy", compile=compiles)
    forward.install(base, options, lambda scored, _: scored, prior_scores=False)
    ids = torch.arange(12).view(2, 6)
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    for _ in range(2):  # the first call probes the model and changes its head
        base(**batch, fused_lm_head=True)
        with model.disable_adapter() if adapter else nullcontext():  # as for a reference, between calls of the policy
            base(**batch, fused_lm_head=True)
    walked, named_modules = [], nn.Module.named_modules

    def counting(self, *args, **kwargs):
        for named in named_modules(self, *args, **kwargs):
            walked.append(named)
            yield named

    monkeypatch.setattr(nn.Module, "named_modules", counting)
    fused = state_of(base)
    assert fused.choose(base, fused, (), batch) is not None
    monkeypatch.undo()
    assert len(walked) < len([*base.modules()]) / 2, "as far as to the first parts that are asked for"
