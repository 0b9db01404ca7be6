"""What models do only while they train, planted in models of Llama. Evaluation mode shows none of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from tests.support.comparison import sharpen
from tests.support.models.planted import Planted, Wrapped, in_layers
from tests.support.models.watching import change


class AddedLoss(torch.autograd.Function):
    """Returns hidden states as they are, and gives the gradient 1 to a loss of their layer."""

    @staticmethod
    def forward(ctx, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


class BalancedExperts(nn.Module):
    """Experts whose router is balanced over each row by a loss of its own, as in DeepSeek-V2's published code."""

    def __init__(self, mlp: nn.Module, width: int, alpha: float):
        super().__init__()
        self.gate, self.alpha = nn.Linear(width, 3, bias=False), alpha
        self.experts = nn.ModuleList([mlp, nn.Linear(width, width), nn.Linear(width, width)])
        for module in (self.gate, *self.experts[1:]):
            sharpen(module)

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.gate(hidden).softmax(-1)  # [R, L, experts]
        weight, chosen = scores.max(-1, keepdim=True)
        mixed = sum(weight * (chosen == i) * expert(hidden) for i, expert in enumerate(self.experts))
        if not self.training:
            return mixed
        load = functional.one_hot(chosen[..., 0], len(self.experts)).to(scores.dtype)
        return AddedLoss.apply(mixed, self.alpha * (load.mean(1) * scores.mean(1)).sum(-1).mean())


class MeanOfTokens(torch.autograd.Function):
    """A linear layer that keeps the mean of the tokens of a batch in the place of its input."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden.mean((0, 1)), weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        mean, weight = ctx.saved_tensors
        return gradient @ weight, torch.outer(gradient.sum((0, 1)), mean)


class Compressed(Wrapped):
    def forward(self, hidden: Tensor) -> Tensor:
        return MeanOfTokens.apply(hidden, self.inner.weight)


def balanced_experts(model: PreTrainedModel) -> None:
    torch.manual_seed(11)
    for layer in model.model.layers:
        layer.mlp = BalancedExperts(layer.mlp, model.config.hidden_size, alpha=0.01)


def compressed_activations(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = Compressed(layer.mlp.up_proj)


def clipping_per_row(model: PreTrainedModel) -> None:
    """What Opacus' hooks do to gradients, in one: those of each row have a bounded norm."""

    def clip(module: nn.Module, given: tuple, gradients: tuple) -> tuple[Tensor]:
        (gradient,) = given
        return (gradient * (1e-3 / gradient.flatten(1).norm(dim=1).clamp(min=1e-3))[:, None, None],)

    model.model.layers[0].mlp.register_full_backward_hook(clip)


def _noisy(module: nn.Module, output: Tensor) -> Tensor:
    """The noise of NEFTune (Jain et al. 2023, Algorithm 1), with alpha 5."""
    if not module.training:
        return output
    bound = 5.0 / math.sqrt(output.shape[1] * output.shape[2])
    return output + torch.empty_like(output).uniform_(-bound, bound)


class Noisy(Wrapped):
    def forward(self, hidden: Tensor) -> Tensor:
        return _noisy(self, self.inner(hidden))


def noise_by_a_hook(model: PreTrainedModel) -> None:
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: _noisy(module, output))


def noise_by_a_forward(model: PreTrainedModel) -> None:
    embeddings = model.get_input_embeddings()
    own = embeddings.forward
    embeddings.forward = lambda ids: _noisy(embeddings, own(ids))


def position_in_training(model: PreTrainedModel) -> None:
    mlp = model.model.layers[1].mlp

    def louder(output: Tensor) -> Tensor:
        ramp = torch.linspace(0, 1, output.shape[1], dtype=output.dtype)
        return output * (1 + ramp[:, None] * mlp.training)

    change(mlp, louder)


def compiled_layers(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager", dynamic=True)


EFFECTS = {
    "balanced experts": Planted(balanced_experts, ("added-gradients",)),
    "compressed activations": Planted(compressed_activations, ("different-gradients",)),
    "clipping per row": Planted(clipping_per_row, ("user-hooks",)),
    "noise by a hook": Planted(noise_by_a_hook, ("user-hooks",)),
    "noise by a forward": Planted(noise_by_a_forward, ("user-hooks",)),
    "noise by a layer": Planted(in_layers(Noisy), ("unknown-randomness",)),
    "positions in training": Planted(position_in_training, ("different-states",)),
    "compiled layers": Planted(compiled_layers),
}
