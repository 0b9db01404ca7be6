"""Shared prompts under dropout: each row has the distribution that it has in the padded batch."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fastdpo.packing import IGNORE_INDEX
from tests.support.models.dropout_draws import (
    Pairs,
    distribution_p_value,
    draw,
    fused_score,
    install,
    larger_variance_p_value,
    mean_p_value,
    stock_score,
)
from tests.support.models.families import FUSED, kind
from tests.support.trl.dpo import LORA, recorded_layouts, tiny_model

PROMPT = 14
LEVEL = 1e-3
"""A test fails if its p-value is smaller. Seeds are fixed, so that a test that has passed
will pass again.
"""

P = 0.2
CALLS, COPIES = 5, 40


def rows(answers=(7, 7)):
    """Pairs with equal prompts and random answers."""
    generator = torch.Generator().manual_seed(0)
    prompts, *both = (torch.randint(3, 97, (2, n), generator=generator) for n in (PROMPT, *answers))
    ids = torch.cat([torch.cat([prompts, answer], 1) for answer in both])
    labels = ids.clone()
    labels[:, :PROMPT] = IGNORE_INDEX
    return Pairs(ids, labels)


def with_adapter(name: str):
    model = tiny_model(kind(name), **FUSED[name][1]) if name in FUSED else tiny_model(name)
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(**LORA | dict(lora_dropout=P)))


def gpt2():
    return tiny_model("gpt2", **FUSED["gpt2"][1] | dict(resid_pdrop=P, embd_pdrop=P, attn_pdrop=0.0))


MODELS = {
    "adapter": lambda: with_adapter("llama"),
    "hidden states": gpt2,
    "experts": lambda: with_adapter("mixtral"),
    "hybrid": lambda: with_adapter("falcon_h1"),
}


def draws(name, score=fused_score, calls=CALLS, seed=0, **request):
    model = MODELS[name]()
    if score is fused_score:
        install(model, **request)
    return draw(model, rows(), score, calls=calls, copies=COPIES, seed=seed)


@pytest.fixture
def layouts(monkeypatch):
    return recorded_layouts(monkeypatch)


@pytest.mark.parametrize("name", MODELS)
def test_expectations_are_those_of_padded_rows(name, layouts):
    stock, shared = draws(name, stock_score), draws(name, seed=1)
    assert all(layout.multiplicity.max() == 2 for layout in layouts)
    assert distribution_p_value(stock.logps, shared.logps) > LEVEL
    assert mean_p_value(stock.logps, shared.logps) > LEVEL
    assert mean_p_value(stock.slopes, shared.slopes) > LEVEL
    assert mean_p_value(stock.loss_slopes, shared.loss_slopes) > LEVEL
    assert larger_variance_p_value(shared.margins(), stock.margins()) > LEVEL
    assert stock.margins().std(0).min() > 0.1, "nothing is drawn"


@pytest.mark.parametrize("share", [True, False])
def test_each_pair_of_a_batch_draws_its_own_masks(share):
    """So that copies of a pair are independent draws."""
    logps = draws("hidden states", calls=1, share_prompts=share).logps
    assert len(logps[:, 0, 0].unique()) == len(logps)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_masks_again(reentrant):
    def gradients(checkpointing):
        model = MODELS["adapter"]()
        install(model)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        torch.manual_seed(0)
        fused_score(model, rows()).sum().backward()
        return [x.grad for x in model.parameters() if x.requires_grad]

    for a, b in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(a, b)
