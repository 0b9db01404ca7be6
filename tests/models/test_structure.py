"""A change of a model changes its structure's hash, by whichever way the change was written."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from fastdpo.models import forward
from fastdpo.models.batch import Call
from fastdpo.models.identity.structure import Structure
from fastdpo.models.running import compiled
from fastdpo.models.state import ForwardOptions, state_of
from tests.support.models.surgeries import MixesTokensWeight
from tests.support.trl.dpo import tiny_model, trained_adapter


def mlp_of(model: PreTrainedModel) -> nn.Module:
    return model.model.layers[0].mlp


def double(module, args, output):
    return output * 2


def renamed(members: dict, old: str, new: str) -> None:
    members[new] = members.pop(old)


def replaced(members: dict, name: str, change: Callable) -> None:
    members[name] = change(members[name])


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "child written": lambda model: model.model.layers[0]._modules.update(mlp=nn.Identity()),
    "child removed": lambda model: model.model.layers[0]._modules.update(mlp=None),
    "child added to a leaf": lambda model: mlp_of(model).act_fn._modules.update(inner=nn.Identity()),
    "child renamed": lambda model: renamed(model.model.layers[0]._modules, "mlp", "feed_forward"),
    "children reordered": lambda model: renamed(model.model.layers._modules, "0", "0"),
    "children replaced by a dictionary in another order": lambda model: replaced(
        vars(model.model.layers), "_modules", lambda children: dict(reversed(children.items()))
    ),
    "child of the model": lambda model: model._modules.update(model=tiny_model(seed=3).model),
    "attribute written": lambda model: vars(mlp_of(model)).update(scale=2.0),
    "attribute removed": lambda model: vars(mlp_of(model)).pop("hidden_size"),
    "attribute changed": lambda model: vars(model.model.layers[0].self_attn).update(scaling=0.5),
    "attribute renamed": lambda model: renamed(vars(mlp_of(model)), "hidden_size", "size"),
    "attributes replaced": lambda model: setattr(mlp_of(model), "__dict__", {**vars(mlp_of(model)), "scale": 2.0}),
    "forward written": lambda model: vars(mlp_of(model)).update(forward=lambda hidden: 2 * hidden),
    "hook written": lambda model: mlp_of(model)._forward_hooks.update({10**6: double}),
    "hooks replaced": lambda model: vars(mlp_of(model)).update(_forward_pre_hooks=OrderedDict({0: double})),
    "backward hook written": lambda model: mlp_of(model)._backward_hooks.update({10**6: double}),
    "parameter of another class": lambda model: replaced(
        mlp_of(model).down_proj._parameters, "weight", lambda x: x.detach().as_subclass(MixesTokensWeight)
    ),
    "parameter of another dtype": lambda model: replaced(
        model.model.norm._parameters, "weight", lambda x: nn.Parameter(x.detach().double())
    ),
    "parameter added": lambda model: mlp_of(model).down_proj._parameters.update(bias=nn.Parameter(torch.zeros(1))),
    "buffer of another dtype": lambda model: replaced(model.model.rotary_emb._buffers, "inv_freq", torch.Tensor.double),
    "class changed": lambda model: setattr(mlp_of(model), "__class__", type("Other", (type(mlp_of(model)),), {})),
    "buffer of the model": lambda model: model.register_buffer("share", torch.ones(3)),
    "parameter of the model": lambda model: model.register_parameter("share", nn.Parameter(torch.ones(3))),
    "buffer of a list of layers": lambda model: model.model.layers.register_buffer("share", torch.ones(3)),
    "buffer of the backbone": lambda model: model.model.register_buffer("share", torch.ones(3)),
    "attention changed": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name):
    model, structure = tiny_model(), Structure()
    before = structure.identity(model).hash
    assert structure.identity(model).hash == before
    CHANGES[name](model)
    assert structure.identity(model).hash != before
    assert structure.identity(model).hash == Structure().identity(model).hash, "as if seen for the first time"


def test_values_of_a_buffer_of_the_model_are_seen():
    model, structure = tiny_model(), Structure()
    structure.identity(model)
    model.register_buffer("share", torch.zeros(1))
    before = structure.identity(model).hash
    model.share.fill_(0.5)
    assert structure.identity(model).hash != before


OF_ONE_NUMBER = {
    "parameter": lambda layer: vars(layer)["_parameters"].update(gate=nn.Parameter(torch.ones(1))),
    "scalar": lambda layer: vars(layer)["_parameters"].update(gate=nn.Parameter(torch.ones(()))),
    "matrix": lambda layer: vars(layer)["_parameters"].update(gate=nn.Parameter(torch.ones(1, 1))),
    "buffer": lambda layer: layer.register_buffer("gate", torch.ones(1)),
    "attribute": lambda layer: setattr(layer, "gate", torch.ones(1)),
    "entry": lambda layer: vars(layer).setdefault("gates", {}).update(gate=torch.ones(1)),
    "parameter of a list": lambda layer: layer.register_parameter("0", nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("of_model", [False, True], ids=["layer", "model"])
@pytest.mark.parametrize("name", OF_ONE_NUMBER)
def test_a_tensor_of_one_number_is_replaced_by_an_equal_one(name, of_model):
    """Which is equal to the earlier one by value."""
    if of_model and name in ("attribute", "entry"):
        pytest.skip("those of the model itself are left out")
    model, structure, write = tiny_model(), Structure(), OF_ONE_NUMBER[name]
    place = model if of_model else mlp_of(model)
    if name == "parameter of a list":
        place.gates = place = nn.ParameterList()
    write(place)
    before = structure.identity(model)
    assert structure.identity(model) is before
    write(place)
    after = structure.identity(model)
    assert after is not before
    assert after.hash == before.hash


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
    assert fused.choose(base, fused, Call.of(batch)) is not None
    monkeypatch.undo()
    assert len(walked) < len([*base.modules()]) / 2, "as far as to the first parts that are asked for"
