"""Trainings whose loss has gradients in it, as penalties of their norm and Hutchinson's estimate have."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid

import fastdpo
from fastdpo.accuracy import error
from tests.integrations.test_custom_loops import gradients, own_logps, rows
from tests.support.comparison import assert_same_gradients, double
from tests.support.kernels import recorder
from tests.support.models.families import tiny_family
from tests.support.trl.dpo import LORA


def eager(model):
    """In float64, with the attention whose gradients torch can differentiate again."""
    model.set_attn_implementation("eager")
    return model.double()


def penalty(loss, model):
    """The squared norm of the gradient, which can be differentiated."""
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    return sum(x.square().sum() for x in gradients if x is not None)


def steps(model, scores):
    """The gradients of three steps of a batch, each with a penalty in its loss."""
    found = []
    for _ in range(3):
        loss = logsigmoid(scores(model, **rows()).sum(1).view(2, -1).diff(dim=0)).mean()
        (loss + 0.1 * penalty(loss, model)).backward()
        found.append(gradients(model))
    return found


def logps_of(model, **batch):
    return fastdpo.score(model, **batch).logps


def with_lora(model):
    return get_peft_model(model, LoraConfig(**LORA))


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("gpt2", eager),
        ("llama", lambda model: with_lora(eager(model))),
        ("gpt_oss", lambda model: eager(double(model))),
    ],
    ids=["full", "LoRA", "sinks and windows"],
)
def test_scores_whose_gradients_are_penalized(name, around):
    model = around(tiny_family(name).eval())
    expected = steps(model, own_logps)
    before = fastdpo.calls.copy()
    assert_same_gradients(steps(fastdpo.prepare(model), logps_of), expected)
    assert [path for _, _, path in fastdpo.calls - before] == ["fused"]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd], ids=["reverse", "forward"])
def test_scores_that_are_transformed(transform, caplog):
    """The host cannot read the ids of such calls."""
    batch = rows()

    class Scoring(torch.nn.Module):
        def __init__(self, model, scores):
            super().__init__()
            self.model, self.scores = model, scores

        def forward(self):
            return self.scores(self.model, **batch).sum()

    def gradient(model, scores):
        module = Scoring(model, scores)
        weights = {"model.model.norm.weight": model.model.norm.weight.detach()}
        return transform(lambda weights: torch.func.functional_call(module, weights, ()))(weights)

    model = eager(tiny_family("llama")).eval()
    expected = gradient(model, own_logps)
    fastdpo.prepare(model)
    logps_of(model, **batch)  # a call that is fused, before and after
    assert_same_gradients([gradient(model, logps_of)], [expected])
    assert [x for x in caplog.messages if "not fused" in x] == [
        "fastdpo: fastdpo.score (policy): not fused, the call is transformed by torch.func, or differentiated in "
        "forward mode [transformed-call]"
    ]
    before = fastdpo.calls.copy()
    logps_of(model, **batch)
    assert [path for _, _, path in fastdpo.calls - before] == ["fused"]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "autocast"])
def test_replays_whose_gradients_are_penalized(bf16, monkeypatch):
    """A replay has no second derivative: its backward runs the layers, as the forward would have."""

    def scores(model, **batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return logps_of(model, **batch)

    model = tiny_family("gpt2").eval()
    expected = steps(fastdpo.prepare(model), scores)
    recorder.install(monkeypatch)
    before = fastdpo.calls.copy()
    found = steps(fastdpo.prepare(model), scores)
    assert (fastdpo.calls - before)["fastdpo.score", "policy", "replayed"] == 2
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        assert max(error(a[name], b[name]) for name in a) < (0.1 if bf16 else 1e-4)
