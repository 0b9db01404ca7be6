"""What models of users have next to their weights: hooks, state, and attributes that change between calls.

Each is planted in a Llama model of any trainer. What changes between calls does so in a hook on the model itself, which
every trainer calls alike, so that stock and patched trainings see the same changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

Model = Any


class Planted(NamedTuple):
    """What is planted, and the names of the reasons that trainings with it give; none if they are fused."""

    plant: Callable[[Model], object]
    reasons: tuple[str, ...] = ()


def layers_of(model: Model) -> nn.ModuleList:
    return model.model.layers


def in_layers(kind: Callable[[nn.Module], nn.Module]) -> Callable[[Model], None]:
    """Wraps the MLP of each layer."""

    def plant(model: Model) -> None:
        for layer in layers_of(model):
            layer.mlp = kind(layer.mlp)

    return plant


def at_each_call(model: Model, change: Callable[[int], None]) -> None:
    """Calls a function with the number of each call of the model before it."""
    calls: list[int] = []

    def before(*_: object) -> None:
        calls.append(len(calls))
        change(calls[-1])

    model.register_forward_pre_hook(before)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner


class Counted(Wrapped):
    """Counts its calls in training, and uses the count."""

    count = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += self.training and torch.is_grad_enabled()
        return self.inner(hidden) * (1 + self.count / 64)


class Calibrated(Wrapped):
    """Calibrates in its first call in training: replaces a buffer, and notes it in a dictionary."""

    def __init__(self, inner: nn.Module):
        super().__init__(inner)
        self.done = {"calibrated": False}
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and not self.done["calibrated"]:
            self.mean, self.done["calibrated"] = hidden.detach().mean(), True
        return self.inner(hidden - self.mean)


class Kept(Wrapped):
    """Keeps its outputs in a list, as for a loss of activations."""

    def __init__(self, inner: nn.Module):
        super().__init__(inner)
        self.outputs: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.outputs.append(self.inner(hidden))
        return self.outputs[-1]


class Mixing(Wrapped):
    """Mixes tokens of a row by a share that a buffer holds, 0 at first."""

    def __init__(self, inner: nn.Module):
        super().__init__(inner)
        self.register_buffer("share", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden + self.share * hidden.mean(1, keepdim=True))


class Scaled(Wrapped):
    """Multiplies by an entry of a dictionary."""

    def __init__(self, inner: nn.Module):
        super().__init__(inner)
        self.scales = {"mlp": 1.0}

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) * self.scales["mlp"]


class Lengthy(Wrapped):
    """Scales one long row by its length, which padded rows are not. Those of a probe, packed, are longer."""

    def forward(self, hidden: Tensor) -> Tensor:
        rows, tokens, _ = hidden.shape
        return self.inner(hidden) * (tokens / 80 if rows == 1 and 80 < tokens < 200 else 1.0)


def eager_attention_of_its_own(model: Model) -> None:
    """By another function than `eager_attention_forward` of the modeling file."""

    def sharper(*args: Any, scaling: float, **options: Any) -> Any:
        return modeling_llama.eager_attention_forward(*args, scaling=2 * scaling, **options)

    own = inspect.unwrap(modeling_llama.LlamaAttention.forward)
    names = own.__globals__ | {"__name__": __name__, "eager_attention_forward": sharper}
    forward = FunctionType(own.__code__, names, argdefs=own.__defaults__)
    kind = type("Sharper", (modeling_llama.LlamaAttention,), {"forward": forward, "__module__": __name__})
    model.set_attn_implementation("eager")
    for layer in layers_of(model):
        layer.self_attn.__class__ = kind


def hook(model: Model) -> None:
    layers_of(model)[0].register_forward_hook(lambda module, args, output: None)


def hook_before(model: Model) -> None:
    layers_of(model)[0].mlp.register_forward_pre_hook(lambda module, args: None)


def hook_of_a_backward_pass(model: Model) -> None:
    layers_of(model)[1].mlp.register_full_backward_hook(lambda module, given, gradients: None)


def hooks_of_parameters(model: Model) -> None:
    """Each doubles what it gets, and counts: a call too many would be seen."""
    for weight in layers_of(model)[0].mlp.parameters():
        seen: list[Tensor] = []

        def double(gradient: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(gradient)
            return gradient * (1 + len(seen))

        weight.register_hook(double)


def optimizer_in_the_backward_pass(model: Model) -> None:
    def step(weight: Tensor) -> None:
        weight.data.sub_(weight.grad, alpha=0.01)

    for weight in layers_of(model)[0].mlp.parameters():
        weight.register_post_accumulate_grad_hook(step)


def hooks_of_checkpointing(model: Model) -> None:
    """Those that transformers adds for adapters, to the embeddings."""
    model.enable_input_require_grads()


def buffer_that_is_switched(model: Model) -> None:
    in_layers(Mixing)(model)
    shares = [layer.mlp.share for layer in layers_of(model)]
    at_each_call(model, lambda n: [x.fill_(0.5 * (n > 1)) for x in shares])


def entry_that_is_changed(model: Model) -> None:
    """A dictionary that is changed in place. Each value is packed as any other, so the model stays fused."""
    in_layers(Scaled)(model)
    scales = [layer.mlp.scales for layer in layers_of(model)]
    at_each_call(model, lambda n: [x.update(mlp=1.0 + (n > 1)) for x in scales])


def attribute_that_changes_each_time(model: Model) -> None:
    attention = layers_of(model)[0].self_attn
    own = attention.scaling
    at_each_call(model, lambda n: setattr(attention, "scaling", own * (1 + n / 8)))


def configuration_that_is_changed(model: Model) -> None:
    """To an entry that fastdpo refuses, and that Llama does not read."""
    at_each_call(model, lambda n: setattr(model.config, "use_bidirectional_attention", n > 1))


PLANTED = {
    "hook": Planted(hook, ("user-hooks",)),
    "hook before": Planted(hook_before, ("user-hooks",)),
    "hook of a backward pass": Planted(hook_of_a_backward_pass, ("user-hooks",)),
    "hooks of parameters": Planted(hooks_of_parameters),
    "optimizer in the backward pass": Planted(optimizer_in_the_backward_pass),
    "hooks of checkpointing": Planted(hooks_of_checkpointing),
    "counted calls": Planted(in_layers(Counted), ("keeps-state",)),
    "calibrated once": Planted(in_layers(Calibrated), ("keeps-state",)),
    "kept activations": Planted(in_layers(Kept), ("keeps-state",)),
    "switched buffer": Planted(buffer_that_is_switched, ("different-states",)),
    "changed entry": Planted(entry_that_is_changed),
    "changing attribute": Planted(attribute_that_changes_each_time),
    "configuration": Planted(configuration_that_is_changed, ("bidirectional",)),
    "scale of lengths": Planted(in_layers(Lengthy), ("different-states",)),
    "eager attention": Planted(eager_attention_of_its_own, ("different-states",)),
}
