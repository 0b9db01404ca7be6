"""LM heads and models whose logits a user has changed: scored as they are, and not modified."""

import functools
from types import MethodType

import pytest
import torch
import torch.nn.utils.prune
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn

import fastdpo
from fastdpo import ref_logps
from fastdpo.models import head as heads
from tests.contract.harness import harnesses
from tests.integrations.test_custom_loops import own_logps
from tests.support.models.altered_heads import ALTERED, closure, forward_of_the_model
from tests.support.ref_logps import assert_close, exact, tokens
from tests.support.trl.dpo import LORA, tiny_model

IDS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 10, 11]])
LABELS = torch.tensor([[-100, -100, -100, 8, 9], [-100, -100, -100, 10, 11]])


def louder(output):
    output.logits = 2 * output.logits
    return output


class Louder(ModelHook):
    def post_forward(self, module, output):
        return louder(output)


def wrapped(model):
    own = model.forward
    model.forward = functools.wraps(own)(lambda *args, **kwargs: louder(own(*args, **kwargs)))


def keeping_signature(model):
    own = model.forward

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return louder(own(input_ids=input_ids, attention_mask=attention_mask, **kwargs))

    model.forward = MethodType(forward, model)


ON_THE_MODEL = {
    "hook": lambda model: model.register_forward_hook(lambda module, args, output: louder(output)),
    "hook written to attributes": lambda model: vars(model).update(
        _forward_hooks={0: lambda module, args, output: louder(output)}
    ),
    "hook of accelerate": lambda model: add_hook_to_module(model, Louder()),
    "wrapped forward": wrapped,
    "wrapped forward with a signature": keeping_signature,
}
"""Changes of the logits by code on a causal LM, or on a module around it."""


def scored(model):
    """The log-probabilities of a batch by `fastdpo.score`, the same by the logits of the model, and the path."""
    before = fastdpo.calls.copy()
    found = fastdpo.score(model, IDS, labels=LABELS)
    ((_, _, path),) = fastdpo.calls - before
    return found.logps, own_logps(model, IDS, torch.ones_like(IDS), LABELS), path


@pytest.mark.parametrize("inside", [False, True], ids=["itself", "around"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "before"])
@pytest.mark.parametrize("name", ON_THE_MODEL)
def test_code_on_a_model_that_is_scored(name, first, inside, caplog):
    """ "around": on the adapter around the model."""
    model = tiny_model().train()
    if inside:
        model = get_peft_model(model, LoraConfig(**LORA))
    if first:
        ON_THE_MODEL[name](model)
        fastdpo.prepare(model)
    else:
        fastdpo.prepare(model)
        assert scored(model)[2] == "fused"
        ON_THE_MODEL[name](model)
    for _ in range(2):
        found, expected, path = scored(model)
        assert path == "stock"
        torch.testing.assert_close(found, expected)
    assert len([x for x in caplog.messages if "[output-hooks]" in x or "[replaced-forward]" in x]) == 1


HARMLESS = {
    "before calls": lambda model: model.register_forward_pre_hook(lambda module, args: None),
    "that change arguments": lambda model: model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "input_ids": kwargs["input_ids"].flip(0)}), with_kwargs=True
    ),
    "of accelerate": lambda model: add_hook_to_module(model, AlignDevicesHook(execution_device="cpu")),
    "of parameters": lambda model: model.lm_head.weight.register_hook(lambda gradient: gradient),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_hooks_on_a_model_that_is_scored_and_stays_fused(name):
    model = fastdpo.prepare(tiny_model().train())
    HARMLESS[name](model)
    found, expected, path = scored(model)
    assert path == "fused"
    if name != "that change arguments":
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["hook", "hook of accelerate", "wrapped forward"])
@pytest.mark.parametrize("trainer", ["trl.TPOTrainer", "trl.OnlineDPOTrainer"])
def test_code_on_a_model_whose_trainer_reads_logits(trainer, name, tmp_path, caplog):
    (harness,) = (x for x in harnesses() if x.name == trainer)

    def prepare(model):
        ON_THE_MODEL[name](model)
        return model

    runs = harness.both(tmp_path, prepare=prepare, max_steps=2)
    assert {path for role, path in runs[-1].calls if role == "policy"} == {"stock"}
    harness.assert_same(*runs)


def test_a_hook_on_a_model_whose_trainer_reads_log_probabilities(tmp_path):
    """It is given what TRL's own fused forward returns."""
    (harness,) = (x for x in harnesses() if x.name == "trl.DPOTrainer")
    seen = []

    def prepare(model):
        def halve(module, args, output):
            seen.append(type(output).__name__)
            output.log_probs = output.log_probs / 2
            return output

        model.register_forward_hook(halve)
        return model

    runs = harness.both(tmp_path, prepare=prepare, max_steps=2)
    assert {path for role, path in runs[-1].calls if role == "policy"} == {"fused"}
    assert {*seen} == {"FusedCausalLMOutput"}
    harness.assert_same(*runs)


@pytest.mark.parametrize("alter", ALTERED)
def test_precomputing(caplog, alter):
    rows, model = tokens(12), alter(tiny_model())
    logps = ref_logps.precompute(model, rows)
    assert ALTERED[alter] in caplog.text
    assert_close(logps, exact(model, rows))


@pytest.mark.parametrize("alter", [closure, forward_of_the_model])
def test_a_forward_replaced_by_the_user_is_kept(alter):
    model = alter(tiny_model())
    owner = model.lm_head if alter is closure else model
    user_forward = owner.forward
    ref_logps.precompute(model, tokens(4))
    assert owner.forward == user_forward


def test_a_forward_wrapped_around_the_patched_one_is_kept():
    head = nn.Linear(3, 5)
    heads.install(head)
    patched_forward = head.forward
    head.forward = user_forward = lambda hidden: patched_forward(hidden)
    assert heads.unsupported_reason(head) is not None
    heads.restore(head)
    assert head.forward is user_forward
    x = torch.randn(2, 3)
    assert torch.equal(head(x), nn.Linear.forward(head, x))


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda head: setattr(head, "weight", nn.Parameter(head.weight.to("meta"))), "offloaded"),
        (lambda head: nn.utils.parametrizations.weight_norm(head), "ParametrizedLinear"),
        (lambda head: nn.utils.prune.random_unstructured(head, "weight", 0.5), "hooks: RandomUnstructured"),
    ],
)
def test_heads_whose_weight_is_computed_or_offloaded_are_unsupported(break_it, reason):
    head = nn.Linear(3, 5)
    assert heads.unsupported_reason(head) is None
    break_it(head)
    assert reason in (heads.unsupported_reason(head) or "")
