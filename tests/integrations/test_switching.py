"""Adapters that are disabled and enabled as by PEFT, without its walks over the model."""

import copy
import warnings

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, VeraConfig, get_peft_model, peft_model
from peft.tuners import tuners_utils
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from trl.trainer import dpo_trainer

import fastdpo
from tests.support.recorded_calls import recorded_calls
from tests.support.trl.dpo import LORA, tiny_model, trained_adapter


def adapter_layers(model):
    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def trained(model):
    return {name: x.requires_grad for name, x in model.named_parameters()}


def disable(layers):
    for layer in layers:
        layer.enable_adapters(False)


STATES = {"enabled": lambda layers: None, "disabled": disable, "irregular": lambda layers: disable(layers[:1])}


@pytest.mark.parametrize("state", STATES)
def test_no_layer_is_described(state, monkeypatch):
    described = recorded_calls(monkeypatch, peft_model, "get_layer_status")

    def run(prepares):
        model = trained_adapter(tiny_model())
        if prepares:
            fastdpo.prepare(model)
        layers = adapter_layers(model)
        STATES[state](layers)
        described.clear()
        seen = []

        def look():
            attributes = {*vars(model), *vars(model.base_model)} - {"disable_adapter", "set_adapter", "__reduce_ex__"}
            seen.append((trained(model), [x.disable_adapters for x in layers], model._adapters_disabled, attributes))

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            look()
            with dpo_trainer.use_adapter(model, None):
                look()
            look()
            with dpo_trainer.use_adapter(model, "default"):
                look()
        return seen, [str(x.message) for x in warned], model, len(described)

    *stock, _, of_stock = run(False)
    *fused, model, of_fused = run(True)
    with model.disable_adapter():
        assert model.get_model_status().enabled is False
    assert fused == stock
    assert bool(stock[1]) == (state == "irregular")
    assert (of_stock, of_fused) == (1, 0 if state == "enabled" else 1)


def test_no_module_is_looked_for(monkeypatch):
    """But layers that are new as well are found, and PEFT's own function runs if it is not the tested one."""
    model = trained_adapter(tiny_model())
    visited = recorded_calls(monkeypatch, torch.nn.Module, "modules", lambda result, module, *args: module)

    def disabled():
        visited.clear()
        with model.disable_adapter():
            looked = model.base_model.model in visited
            states = {layer.disable_adapters for layer in adapter_layers(model)}
        assert states == {True}
        assert not any(layer.disable_adapters for layer in adapter_layers(model))
        return looked

    assert disabled()
    fastdpo.prepare(model)
    disabled()
    assert not disabled()
    first, second, *_ = (layer.self_attn for layer in model.base_model.model.model.layers)
    first.q_proj = copy.deepcopy(second.q_proj)
    disabled()
    assert not disabled()
    second.q_proj.lora_A.default.inner = copy.deepcopy(first.q_proj)  # in a module that had no others
    disabled()
    assert not disabled()
    own = BaseTuner._enable_adapter_layers
    monkeypatch.setattr(type(model.base_model), own.__name__, lambda self, enabled: own(self, enabled=enabled))
    assert disabled()


def freeze(model):
    next(x for x in model.parameters() if x.requires_grad).requires_grad_(False)


def replace_weight(model):
    """By a new parameter, wherever the adapter keeps it."""
    name, x = next((name, x) for name, x in model.named_parameters() if ".default" in name and x.is_leaf)
    module, _, name = name.rpartition(".")
    model.get_submodule(module)._parameters[name] = torch.nn.Parameter(x.detach().clone(), requires_grad=False)


CHANGES = {
    "none": lambda model: None,
    "froze a weight": freeze,
    "replaced a weight": replace_weight,
    "one more adapter": lambda model: model.add_adapter("other", model.peft_config["default"]),
    "another one is active": lambda model: model.set_adapter("other"),
    "merged": lambda model: model.merge_adapter(),
    "one is deleted": lambda model: model.delete_adapter("default"),
}
TARGETS = dict(target_modules=["q_proj", "down_proj"])
ADAPTERS = {  # and which of PEFT's walks over the layers are saved
    "LoRA": (LoraConfig(**LORA), "all"),
    "DoRA": (LoraConfig(**LORA, use_dora=True), "all"),
    "VeRA": (VeraConfig(r=2, **TARGETS), "all"),
    "IA3": (IA3Config(**TARGETS, feedforward_modules=["down_proj"]), "all"),
    "saved modules": (LoraConfig(**LORA, modules_to_save=["lm_head"]), "those to disable and enable"),
    "layer norms": (LNTuningConfig(), "none"),  # with functions of their own
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_switched_as_by_peft(kind, monkeypatch):
    """Also after changes, but in a model that is as it was without a walk over the modules of each layer."""
    config, saved = ADAPTERS[kind]
    walked = recorded_calls(monkeypatch, tuners_utils, "_set_layer_requires_grad")

    def run(prepares):
        model = get_peft_model(tiny_model(), copy.deepcopy(config))
        if prepares:
            fastdpo.prepare(model)
        seen, walks = [], []

        def look():
            layers = [
                (x.disable_adapters, x.active_adapters, getattr(x, "merged", None)) for x in adapter_layers(model)
            ]
            seen.append((trained(model), layers, model.active_adapter, model.base_model.active_adapters))

        for change in CHANGES.values():
            change(model)
            for _ in range(3):
                walked.clear()
                for name in (None, *model.peft_config):
                    with dpo_trainer.use_adapter(model, name):
                        look()
                    look()
            walks.append(len(walked))
        return seen, walks

    stock, of_stock = run(False)
    fused, of_fused = run(True)
    assert fused == stock
    assert len({str(x) for x in stock}) > len(CHANGES)
    for walks, walks_of_stock in zip(of_fused, of_stock, strict=True):
        match saved:
            case "all":
                assert walks == 0 < walks_of_stock
            case "none":
                assert walks == walks_of_stock
            case _:
                assert 0 < walks < walks_of_stock


def test_adapters_are_set_by_a_list_that_changes():
    model = trained_adapter(tiny_model())
    model.add_adapter("other", model.peft_config["default"])
    fastdpo.prepare(model)
    names = ["other"]
    model.base_model.set_adapter(names)
    for _ in range(2):
        with model.disable_adapter():
            pass
        found = {name for name, requires_grad in trained(model).items() if requires_grad}
        assert {adapter for adapter in model.peft_config for name in found if f".{adapter}." in name} == {*names}
        names.append("default")


def test_adapters_that_are_merged_again():
    """PEFT unmerges them where one is set."""
    model = fastdpo.prepare(trained_adapter(tiny_model()))
    for _ in range(3):
        model.merge_adapter()
        with pytest.warns(UserWarning, match="Unmerging the model first"):
            model.set_adapter("default")
        assert not any(layer.merged for layer in adapter_layers(model))


class WithHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.head = tiny_model(), torch.nn.Linear(1, 1)


def test_adapters_outside_of_the_transformers_model():
    model = fastdpo.prepare(get_peft_model(WithHead(), LoraConfig(target_modules=["q_proj", "head"])))
    with model.disable_adapter():
        assert {x.disable_adapters for x in adapter_layers(model)} == {True}
    assert {x.disable_adapters for x in adapter_layers(model)} == {False}


@pytest.mark.parametrize("in_class", [False, True])
def test_a_layer_with_a_function_of_its_own(in_class):
    model = fastdpo.prepare(trained_adapter(tiny_model()))
    enabled, layer = [], adapter_layers(model)[0]
    for _ in range(2):
        with model.disable_adapter():
            pass
    if in_class:
        own = {"enable_adapters": lambda self, value: enabled.append(value)}
        layer.__class__ = type("Own", (type(layer),), own)
    else:
        layer.enable_adapters = enabled.append
    for _ in range(2):
        with model.disable_adapter():
            pass
    assert enabled == [False, True] * 2
