"""Entries of a configuration, and attributes of modules, that change once a model is prepared."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

import fastdpo
from tests.contract.harness import harnesses
from tests.integrations.test_custom_loops import own_logps
from tests.support.comparison import assert_close, assert_same_gradients
from tests.support.models.families import FUSED, kind, tiny_family
from tests.support.models.planted import at_each_call

IDS = torch.randint(5, 90, (4, 12), generator=torch.Generator().manual_seed(0))
BATCH = dict(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS.index_fill(1, torch.arange(4), -100))


def config(**entries):
    """Sets entries of the configuration."""
    return lambda model: vars(model.config).update(entries)


def modules(**attributes):
    """Sets attributes of the modules that have them, and in which they are not None."""

    def change(model):
        for module in model.modules():
            for name in attributes:
                if getattr(module, name, None) is not None:
                    setattr(module, name, attributes[name])

    return change


class Scaled(LlamaForCausalLM):
    """A model of a user's, whose forward reads an attribute of its own."""

    scale = 1.0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.scale
        return output


def scaled():
    model = tiny_family("llama")
    model.__class__ = Scaled
    return model


CHANGES = {  # with the family, and the path from then on
    "softcap": ("gemma2", config(final_logit_softcapping=1.0), "fused"),
    "no softcap": ("gemma2", config(final_logit_softcapping=None), "fused"),
    "scale of logits": ("granite", config(logits_scaling=7.0), "fused"),
    "scale that the model has read": ("cohere2", config(logit_scale=3.0), "stock"),
    "scale of the model": ("cohere2", modules(logit_scale=3.0), "stock"),
    "window": ("gemma2", config(sliding_window=2), "stock"),  # which masks are made of, and layers have read
    "window of layers": ("gemma2", modules(sliding_window=2), "stock"),  # which eager attention does not read
    "window of both": ("gemma2", lambda model: [f(sliding_window=2)(model) for f in (config, modules)], "fused"),
    "scale of a forward": ("scaled", lambda model: setattr(model, "scale", 2.0), "stock"),
    "both directions": ("llama", modules(is_causal=False), "stock"),
    "both directions by configuration": ("llama", config(use_bidirectional_attention=True), "stock"),
}

UNREAD = ("scale that the model has read", "window of layers", "both directions by configuration")
"""Changes that the own code of these models does not look at, but packed runs would."""


def scored(model):
    return fastdpo.score(model, **BATCH).logps


def gradients(model, logps):
    model.zero_grad()
    logps.sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("called", [False, True], ids=["before its first call", "later"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_prepared_model(name, called):
    family, change, path = CHANGES[name]
    stock = (scaled() if family == "scaled" else tiny_family(family)).eval()
    model = fastdpo.prepare(copy.deepcopy(stock))
    earlier = own_logps(stock, **BATCH)
    if called:
        assert_close(scored(model), earlier, absolute=1e-5)
    for each in (stock, model):
        change(each)
    before = fastdpo.calls.copy()
    expected, found = own_logps(stock, **BATCH), scored(model)
    assert {key[2] for key in fastdpo.calls - before} == {path}
    assert_close(found, expected, absolute=1e-5)
    assert_same_gradients([gradients(stock, expected)], [gradients(model, found)])
    if name not in UNREAD:
        assert (found - earlier).norm() > 1e-3 * earlier.norm()


TRAINERS = [x for x in harnesses() if x.name in {f"trl.{name}Trainer" for name in ("DPO", "CPO", "ORPO")}]


@pytest.mark.parametrize("harness", [pytest.param(x, id=x.name) for x in TRAINERS])
def test_a_model_of_a_trainer(harness, tmp_path):
    """TRL's DPOTrainer reads the softcap when it is made, and the others in each call."""

    def changing(model):
        at_each_call(model, lambda n: config(final_logit_softcapping=3.0 if n < 2 else 0.5)(model))
        return model

    runs = harness.both(tmp_path, kind=kind("gemma2"), tiny=FUSED["gemma2"][1], prepare=changing, max_steps=3)
    assert {path for _, path in runs[-1].calls} == {"fused"}
    harness.assert_same(*runs)
