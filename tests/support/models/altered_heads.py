"""Changes that users make to a head or to a model's forward. Each changes the logits.

A patched training must keep their effect.
"""

from __future__ import annotations

from types import MethodType

from transformers import PreTrainedModel


def closure(model: PreTrainedModel) -> PreTrainedModel:
    stock = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * stock(hidden)
    return model


def hook(model: PreTrainedModel) -> PreTrainedModel:
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def hook_before(model: PreTrainedModel) -> PreTrainedModel:
    model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return model


def forward_of_the_model(model: PreTrainedModel) -> PreTrainedModel:
    stock = model.forward

    def louder(self, *args, **kwargs):
        output = stock(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    model.forward = MethodType(louder, model)
    return model


ALTERED = {
    closure: "the head's forward was replaced by closure.<locals>.<lambda>",
    hook: "the head has hooks: hook.<locals>.<lambda>",
    hook_before: "the head has hooks: hook_before.<locals>.<lambda>",
    forward_of_the_model: "its forward was replaced by forward_of_the_model.<locals>.louder",
}
"""Maps each change to the reason why the changed model is not fused in a trainer that scores the
logits of the model's own forward.
"""
