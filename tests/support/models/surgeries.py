"""Changes that users make to a model between two steps of a training."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.support.models.planted import Wrapped
from tests.support.trl.dpo import LORA, WORDS

Operation = Callable[[PreTrainedModel], None]
DIFFER = "the packed hidden states of LlamaForCausalLM differ"
SURGERIES: list[Surgery] = []


@dataclass(frozen=True)
class Surgery:
    """A change that users make to a policy between two steps.

    Attributes:
        operate: applies the change to the policy.
        description: the change in words, for docs/support.md.
        reason: why the policy is not fused from then on; None if it stays fused.
        adapter: whether the policy has an adapter.
    """

    operate: Operation
    description: str
    reason: str | None = None
    adapter: bool = False


def surgery(description: str, reason: str | None = None, *, adapter: bool = False) -> Callable[[Operation], Operation]:
    """Decorates the `operate` of a `Surgery`, and appends it to `SURGERIES`."""

    def listed(operate: Operation) -> Operation:
        SURGERIES.append(Surgery(operate, description, reason, adapter))
        return operate

    return listed


@surgery("embeddings resized")
def resize(model: PreTrainedModel) -> None:
    torch.manual_seed(7)  # for the new rows
    model.resize_token_embeddings(len(WORDS) + 5)


@surgery("head tied to the embedding")
def tie(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


@surgery("head untied")
def untie(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() * 1.5)


@surgery("head replaced")
def new_head(model: PreTrainedModel) -> None:
    torch.manual_seed(7)
    model.lm_head = nn.Linear(model.config.hidden_size, len(WORDS), bias=False)


class Louder(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


@surgery("class of the head changed", "the head must be a plain nn.Linear; it is tests.Louder")
def head_of_another_class(model: PreTrainedModel) -> None:
    model.lm_head.__class__ = Louder


@surgery("forward of the head replaced", "the head's forward was replaced by closure_in_the_head.<locals>.<lambda>")
def closure_in_the_head(model: PreTrainedModel) -> None:
    stock = model.lm_head.forward
    model.lm_head.forward = lambda hidden: stock(hidden) * 2


@surgery("forward of the head wrapped", "the head's forward was replaced by closure_around_the_fused_head")
def closure_around_the_fused_head(model: PreTrainedModel) -> None:
    stock = model.lm_head.forward
    model.lm_head.forward = lambda *args, **kwargs: stock(*args, **kwargs)


@surgery("forward hook on the head", "the head has hooks: hook_on_the_head.<locals>.<lambda>")
def hook_on_the_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


@surgery("forward pre-hook on the head", "the head has hooks: hook_before_the_head.<locals>.<lambda>")
def hook_before_the_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: args)


@surgery("hook on a layer", "hooks on its modules see its activations: hook_on_a_layer.<locals>.<lambda>")
def hook_on_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.25)


@surgery("hook on a weight, as of an optimizer in the backward pass")
def hook_of_gradients(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient * 0.5)


class ReadsPositions(Wrapped):
    def forward(self, hidden):
        output = self.inner(hidden)
        return torch.cat([output[:, :1] + 1.0, output[:, 1:]], 1)


@surgery("layer wrapped by one that reads positions", DIFFER)
def layer_that_reads_positions(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = ReadsPositions(model.model.layers[0].mlp)


class ReadsShapes(Wrapped):
    def forward(self, hidden):
        if len(hidden) % 2:
            raise ValueError("an even number of rows was expected")
        return self.inner(hidden)


@surgery(
    "layer wrapped by one that reads shapes",
    "LlamaForCausalLM cannot be run on packed tokens: ValueError: an even number",
)
def layer_that_reads_shapes(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = ReadsShapes(model.model.layers[0].mlp)


class Halved(Wrapped):
    def forward(self, hidden):
        return self.inner(hidden) * 0.5


@surgery("layer wrapped")
def wrapped_layer(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = Halved(model.model.layers[1].mlp)


@surgery(
    "forward of a layer replaced", "hooks on its modules see its activations: forward_of_a_layer.<locals>.<lambda>"
)
def forward_of_a_layer(model: PreTrainedModel) -> None:
    stock = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda hidden: stock(hidden) * 0.5


@surgery("layer replaced")
def new_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(model.config.hidden_size, model.config.hidden_size))
    torch.manual_seed(7)
    nn.init.normal_(model.model.layers[0].mlp[0].weight, std=0.3)


class MixesTokens(nn.Module):
    def forward(self, hidden):
        return hidden.roll(1, 1)


@surgery("layer replaced by one that mixes tokens", DIFFER)
def layer_that_mixes_tokens(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = MixesTokens()


class RollingMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x).roll(1, 1)


@surgery("class of a layer changed", DIFFER)
def layer_of_another_class(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.__class__ = RollingMLP


@surgery("layer deleted and set again", DIFFER)
def layer_in_the_same_place(model: PreTrainedModel) -> None:
    del model.model.layers[0].mlp
    model.model.layers[0].mlp = MixesTokens()


@surgery("layer written to `_modules`", DIFFER)
def layer_written_to_modules(model: PreTrainedModel) -> None:
    model.model.layers[0]._modules["mlp"] = MixesTokens()


class MixesTokensWeight(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs or {})
        return output.as_subclass(torch.Tensor).roll(1, 1) if func is nn.functional.linear else output


@surgery("weight of a layer written to `_parameters`", DIFFER)
def weight_written_to_parameters(model: PreTrainedModel) -> None:
    weights = model.model.layers[0].mlp.down_proj._parameters
    weights["weight"] = weights["weight"].detach().as_subclass(MixesTokensWeight)


@surgery(
    "forward of a layer written to `vars(module)`",
    "hooks on its modules see its activations: forward_written_to_attributes.<locals>.<lambda>",
)
def forward_written_to_attributes(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    stock = mlp.forward
    vars(mlp)["forward"] = lambda hidden: stock(hidden).roll(1, 1)


@surgery(
    "hooks of a layer written to `vars(module)`",
    "hooks on its modules see its activations: hooks_written_to_attributes.<locals>.<lambda>",
)
def hooks_written_to_attributes(model: PreTrainedModel) -> None:
    vars(model.model.layers[0].mlp)["_forward_hooks"] = OrderedDict({0: lambda module, args, output: output.roll(1, 1)})


@surgery("attention dropout written to `vars(module)`", "attention dropout is active")
def dropout_written_to_attributes(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        vars(layer.self_attn)["attention_dropout"] = 1e-9  # so small that nothing is dropped


@surgery("attention dropout set on layers", "attention dropout is active")
def attention_dropout(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-9  # so small that nothing is dropped


@surgery('`set_attn_implementation("eager")`')
def eager(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


@surgery('`set_attn_implementation("eager")`, then back')
def eager_and_back(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")
    model.set_attn_implementation("sdpa")


@surgery("custom attention implementation", "attention implementation 'users_own' is not supported")
def custom_attention(model: PreTrainedModel) -> None:
    AttentionInterface.register("users_own", ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register("users_own", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("users_own")


@surgery("layer frozen")
def freeze(model: PreTrainedModel) -> None:
    model.model.layers[0].requires_grad_(False)


@surgery("gradient checkpointing enabled")
def checkpoint(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


@surgery("adapter added and activated", adapter=True)
def second_adapter(model) -> None:
    torch.manual_seed(7)
    model.add_adapter("second", LoraConfig(**LORA))
    model.set_adapter("second")


@surgery("adapter merged", adapter=True)
def merged_adapter(model) -> None:
    model.merge_adapter()
    model.get_base_model().model.norm.requires_grad_(True)  # otherwise nothing would be trained


@surgery("scaling of the adapter changed", adapter=True)
def larger_adapter(model) -> None:
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.scaling["default"] *= 2
