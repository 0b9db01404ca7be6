"""Two fused models that share modules: what is done to one of them leaves the other as it is."""

import pickle

import pytest
import torch

import fastdpo
from tests.support.models.families import HYBRID, kind
from tests.support.trl.dpo import tiny_model

IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])


def share_layers(model, other):
    other.model.layers[0] = model.model.layers[0]


def share_backbones(model, other):
    other.model = model.model


def share_heads(model, other):
    other.lm_head = model.lm_head


SHARED = {"layers": share_layers, "backbones": share_backbones, "heads": share_heads}
ENDS = {"restored": fastdpo.restore, "pickled": pickle.dumps}


@pytest.mark.parametrize("name", ["llama", "lfm2"])
@pytest.mark.parametrize("shared", SHARED)
def test_models_that_share_modules(shared, name):
    """One of them is restored or pickled between the forward and the backward of the other, with checkpointing."""
    for end in ENDS.values():
        check_apart(shared, name, end)


def check_apart(shared, name, end):
    models = [tiny_model(kind(name), seed, **(HYBRID[name][1] if name in HYBRID else {})) for seed in (0, 1)]
    SHARED[shared](*models)
    for model in models:
        fastdpo.prepare(model)
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        if hasattr(model, "_require_grads_hook"):  # a local function, which transformers 5 sets
            model.disable_input_require_grads()
        model.train()

    def scored(model, then=lambda: None):
        parameters = [x for x in model.parameters() if x.requires_grad]
        sums = fastdpo.score(model, IDS, torch.ones_like(IDS), IDS).sums()
        then()
        return sums.detach(), *torch.autograd.grad(sums.sum(), parameters, allow_unused=True)

    for first, second in (models, models[::-1]):
        expected = [scored(x) for x in (first, second)][1]
        fused = fastdpo.calls["fastdpo.score", "policy", "fused"]
        for then in (lambda first=first: end(first), lambda: None):
            for x, y in zip(scored(second, then), expected, strict=True):
                assert (x is None and y is None) or torch.equal(x, y)
        assert fastdpo.calls["fastdpo.score", "policy", "fused"] == fused + 2
        fastdpo.prepare(first)
        scored(first)
    for model in models:
        fastdpo.restore(model)
    assert [x.config._attn_implementation for x in models] == ["sdpa"] * 2
    for module in (x for model in models for x in model.modules()):
        assert not module._forward_pre_hooks
        assert not {"forward", "__reduce_ex__"} & vars(module).keys()
