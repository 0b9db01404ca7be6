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

from tests.support.models.watching import change
from tests.support.trl.dpo import LORA, WORDS


def resize(model: PreTrainedModel) -> None:
    torch.manual_seed(7)  # for the new rows
    model.resize_token_embeddings(len(WORDS) + 5)


def tie(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def untie(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() * 1.5)


def new_head(model: PreTrainedModel) -> None:
    torch.manual_seed(7)
    model.lm_head = nn.Linear(model.config.hidden_size, len(WORDS), bias=False)


class Louder(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def head_of_another_class(model: PreTrainedModel) -> None:
    model.lm_head.__class__ = Louder


def closure_in_the_head(model: PreTrainedModel) -> None:
    stock = model.lm_head.forward
    model.lm_head.forward = lambda hidden: stock(hidden) * 2


def closure_around_the_fused_head(model: PreTrainedModel) -> None:
    stock = model.lm_head.forward
    model.lm_head.forward = lambda *args, **kwargs: stock(*args, **kwargs)


def hook_on_the_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


def hook_before_the_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: args)


def hook_on_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.25)


def hook_of_gradients(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient * 0.5)


def forward_that_reads_positions(model: PreTrainedModel) -> None:
    change(model.model.layers[0].mlp, lambda output: torch.cat([output[:, :1] + 1.0, output[:, 1:]], 1))


def forward_that_reads_shapes(model: PreTrainedModel) -> None:
    def check(output):
        if len(output) % 2:
            raise ValueError("an even number of rows was expected")
        return output

    change(model.model.layers[0].mlp, check)


def forward_of_a_layer(model: PreTrainedModel) -> None:
    change(model.model.layers[1].mlp, lambda output: output * 0.5)


def new_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(model.config.hidden_size, model.config.hidden_size))
    torch.manual_seed(7)
    nn.init.normal_(model.model.layers[0].mlp[0].weight, std=0.3)


class MixesTokens(nn.Module):
    def forward(self, hidden):
        return hidden.roll(1, 1)


def layer_that_mixes_tokens(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = MixesTokens()


class MixesTokensWeight(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs or {})
        return output.as_subclass(torch.Tensor).roll(1, 1) if func is nn.functional.linear else output


def weight_written_to_parameters(model: PreTrainedModel) -> None:
    weights = model.model.layers[0].mlp.down_proj._parameters
    weights["weight"] = weights["weight"].detach().as_subclass(MixesTokensWeight)


class RollingMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x).roll(1, 1)


def layer_of_another_class(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.__class__ = RollingMLP


def layer_in_the_same_place(model: PreTrainedModel) -> None:
    del model.model.layers[0].mlp
    model.model.layers[0].mlp = MixesTokens()


def layer_written_to_modules(model: PreTrainedModel) -> None:
    model.model.layers[0]._modules["mlp"] = MixesTokens()


def forward_written_to_attributes(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    stock = mlp.forward
    vars(mlp)["forward"] = lambda hidden: stock(hidden).roll(1, 1)


def hooks_written_to_attributes(model: PreTrainedModel) -> None:
    vars(model.model.layers[0].mlp)["_forward_hooks"] = OrderedDict({0: lambda module, args, output: output.roll(1, 1)})


def dropout_written_to_attributes(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        vars(layer.self_attn)["attention_dropout"] = 1e-9  # so small that nothing is dropped


def attention_dropout(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-9  # so small that nothing is dropped


def eager(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


def eager_and_back(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")
    model.set_attn_implementation("sdpa")


def custom_attention(model: PreTrainedModel) -> None:
    AttentionInterface.register("users_own", ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register("users_own", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("users_own")


def freeze(model: PreTrainedModel) -> None:
    model.model.layers[0].requires_grad_(False)


def checkpoint(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def second_adapter(model) -> None:
    torch.manual_seed(7)
    model.add_adapter("second", LoraConfig(**LORA))
    model.set_adapter("second")


def merged_adapter(model) -> None:
    model.merge_adapter()
    model.get_base_model().model.norm.requires_grad_(True)  # otherwise nothing would be trained


def larger_adapter(model) -> None:
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.scaling["default"] *= 2


@dataclass(frozen=True)
class Surgery:
    """A change that users make to a policy between two steps.

    Attributes:
        operate: applies the change to the policy.
        description: the change in words, for docs/support.md.
        reason: why the policy is not fused from then on; None if it stays fused.
        adapter: whether the policy has an adapter.
    """

    operate: Callable[[PreTrainedModel], None]
    description: str
    reason: str | None = None
    adapter: bool = False


SURGERIES = [
    Surgery(resize, "embeddings resized"),
    Surgery(tie, "head tied to the embedding"),
    Surgery(untie, "head untied"),
    Surgery(new_head, "head replaced"),
    Surgery(head_of_another_class, "class of the head changed", "the head must be a plain nn.Linear; it is Louder"),
    Surgery(
        closure_in_the_head,
        "forward of the head replaced",
        "the head's forward was replaced by closure_in_the_head.<locals>.<lambda>",
    ),
    Surgery(
        closure_around_the_fused_head,
        "forward of the head wrapped",
        "the head's forward was replaced by closure_around_the_fused_head",
    ),
    Surgery(hook_on_the_head, "forward hook on the head", "the head has hooks: hook_on_the_head.<locals>.<lambda>"),
    Surgery(
        hook_before_the_head,
        "forward pre-hook on the head",
        "the head has hooks: hook_before_the_head.<locals>.<lambda>",
    ),
    Surgery(
        hook_on_a_layer,
        "hook on a layer",
        "hooks on its modules see its activations: hook_on_a_layer.<locals>.<lambda>",
    ),
    Surgery(hook_of_gradients, "hook on a weight, as of an optimizer in the backward pass"),
    Surgery(
        forward_that_reads_positions,
        "forward of a layer replaced by one that reads positions",
        "the packed hidden states of LlamaForCausalLM differ",
    ),
    Surgery(
        forward_that_reads_shapes,
        "forward of a layer replaced by one that reads shapes",
        "LlamaForCausalLM cannot be run on padded rows: ValueError: an even number",
    ),
    Surgery(forward_of_a_layer, "forward of a layer replaced"),
    Surgery(new_layer, "layer replaced"),
    Surgery(
        layer_that_mixes_tokens,
        "layer replaced by one that mixes tokens",
        "the packed hidden states of LlamaForCausalLM differ",
    ),
    Surgery(layer_of_another_class, "class of a layer changed", "the packed hidden states of LlamaForCausalLM differ"),
    Surgery(
        layer_in_the_same_place, "layer deleted and set again", "the packed hidden states of LlamaForCausalLM differ"
    ),
    Surgery(
        layer_written_to_modules, "layer written to `_modules`", "the packed hidden states of LlamaForCausalLM differ"
    ),
    Surgery(
        weight_written_to_parameters,
        "weight of a layer written to `_parameters`",
        "the packed hidden states of LlamaForCausalLM differ",
    ),
    Surgery(
        forward_written_to_attributes,
        "forward of a layer written to `vars(module)`",
        "the packed hidden states of LlamaForCausalLM differ",
    ),
    Surgery(
        hooks_written_to_attributes,
        "hooks of a layer written to `vars(module)`",
        "hooks on its modules see its activations: hooks_written_to_attributes.<locals>.<lambda>",
    ),
    Surgery(
        dropout_written_to_attributes,
        "attention dropout written to `vars(module)`",
        "attention dropout is active",
    ),
    Surgery(attention_dropout, "attention dropout set on layers", "attention dropout is active"),
    Surgery(eager, '`set_attn_implementation("eager")`'),
    Surgery(eager_and_back, '`set_attn_implementation("eager")`, then back'),
    Surgery(
        custom_attention,
        "custom attention implementation",
        "attention implementation 'users_own' is not supported",
    ),
    Surgery(freeze, "layer frozen"),
    Surgery(checkpoint, "gradient checkpointing enabled"),
    Surgery(second_adapter, "adapter added and activated", adapter=True),
    Surgery(merged_adapter, "adapter merged", adapter=True),
    Surgery(larger_adapter, "scaling of the adapter changed", adapter=True),
]
