"""The DPO loss of pairs from hidden states and the LM head's weight, by several libraries: loss and gradients.

The log-probabilities under the reference are zero, since Liger's loss takes none without a second head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Arrays
from benchmarks.sides.heads import ExactHead, HeadInputs, HeadWorkload
from fastdpo import ops

IGNORED = -100
BETA = 0.1


@dataclass(frozen=True)
class LossWorkload:
    """Lengths of completions, and size and dtype of a head.

    Attributes:
        pairs: tokens of the chosen and of the rejected completion of each pair.
        v: size of the vocabulary.
        d: hidden size.
        trainable: whether the weight needs a gradient. Under LoRA it does not.
        dtype: dtype of hidden states and weight.
    """

    pairs: tuple[tuple[int, int], ...]
    v: int
    d: int
    trainable: bool
    dtype: str = "float32"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion: the chosen ones, then the rejected ones."""
        return [length for side in zip(*self.pairs, strict=True) for length in side]

    @property
    def head(self) -> HeadWorkload:
        return HeadWorkload(sum(self.lengths), self.v, self.d, self.trainable, self.dtype)


class LossInputs(HeadInputs):
    """Inputs that are equal in every process.

    Attributes:
        cu_seqlens: int32 [2P + 1] on the CPU, the bounds of the completions.
        references: [P] zeros, the reference's log-probabilities of the chosen or rejected ones.
    """

    def __init__(self, workload: LossWorkload) -> None:
        super().__init__(workload.head)
        self.lengths = workload.lengths
        self.cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
        self.references = self.hidden.new_zeros(len(workload.pairs), dtype=torch.float32)

    def padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Values [N, ...] of the tokens as [2P, longest, ...]."""
        return torch.nn.utils.rnn.pad_sequence(x.split(self.lengths), batch_first=True, padding_value=value)


class _Loss:
    """A loss of a library. Called for the loss; `hidden` is what its gradient is taken by."""

    def __init__(self, inputs: LossInputs) -> None:
        self.inputs = inputs
        self.hidden = inputs.hidden.requires_grad_()

    def __call__(self) -> Tensor:
        raise NotImplementedError

    def of_tokens(self, gradient: Tensor) -> Tensor:
        """The gradient of `hidden` for the N tokens."""
        return gradient


class PlainLoss(_Loss):
    """Logits of all tokens, as in plain PyTorch."""

    def __init__(self, inputs: LossInputs) -> None:
        super().__init__(inputs)
        completions = torch.arange(len(inputs.lengths)).repeat_interleave(torch.tensor(inputs.lengths))
        self.completions = completions.to(inputs.hidden.device)  # [N]

    def __call__(self) -> Tensor:
        x = self.inputs
        logps = -F.cross_entropy(F.linear(self.hidden, x.weight).float(), x.targets, reduction="none")
        sums = logps.new_zeros(len(x.lengths)).index_add(0, self.completions, logps)
        chosen, rejected = sums.chunk(2)
        margins = (chosen - x.references) - (rejected - x.references)
        return -F.logsigmoid(BETA * margins).mean()


class FastdpoLoss(_Loss):
    """fastdpo's loss of pairs."""

    def __call__(self) -> Tensor:
        x = self.inputs
        return ops.linear_preference_loss(
            self.hidden, x.weight, x.targets, x.cu_seqlens, x.references, x.references
        ).loss


class LigerLoss(_Loss):
    """Liger's loss of padded rows."""

    def __init__(self, inputs: LossInputs) -> None:
        super().__init__(inputs)
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

        self.loss = LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False)
        self.hidden = inputs.padded(inputs.hidden.detach()).requires_grad_()
        self.targets = inputs.padded(inputs.targets, IGNORED)

    def __call__(self) -> Tensor:
        return self.loss(self.inputs.weight, self.hidden, self.targets)[0]

    def of_tokens(self, gradient: Tensor) -> Tensor:
        return gradient[self.targets != IGNORED]


LOSSES: dict[str, Callable[[LossInputs], _Loss]] = {
    "plain PyTorch": PlainLoss,
    "Liger": LigerLoss,
    "fastdpo": FastdpoLoss,
}


DESCRIPTIONS = {
    "plain PyTorch": "`linear` and `cross_entropy` on the logits of all tokens, their sums over each completion, and "
    "`logsigmoid`.",
    "Liger": "`LigerFusedLinearDPOLoss` without a reference model and else with its defaults: compiled, one pair at a "
    "time, on padded rows.",
    "fastdpo": "`fastdpo.ops.linear_preference_loss`.",
}


class LossStep:
    """Loss and gradients of one library."""

    batches = 1

    def __init__(self, workload: LossWorkload, peer: str) -> None:
        self.inputs = LossInputs(workload)
        self.inputs.weight.requires_grad_(workload.trainable)
        self.loss = LOSSES[peer](self.inputs)

    def _run(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight = self.inputs.weight
        loss = self.loss()
        return loss, torch.autograd.grad(loss, [self.loss.hidden, *[weight] * weight.requires_grad])

    def check(self) -> Arrays:
        loss, (grad_hidden, *grad_weight) = self._run()
        x = self.inputs
        quantities = {"loss": loss, "gradient of hidden states": self.loss.of_tokens(grad_hidden)[x.compared]}
        if grad_weight:
            quantities["gradient of the weight"] = x.project(grad_weight[0])
        return {name: value.detach().double().cpu().numpy() for name, value in quantities.items()}

    def step(self, batch: int) -> None:
        self._run()

    def reset(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {}


class ExactLoss:
    """The loss of exact log-probabilities, and the gradients of a head (`ExactHead`) that it leads to."""

    batches = 1

    def __init__(self, workload: LossWorkload) -> None:
        self.workload = workload
        self.head = ExactHead(workload.head)

    def check(self) -> Arrays:
        logps = self.head.check()
        arrays = {}
        for kind in ("plain", "exact"):  # exact gradients are those of the exact loss
            of_tokens = torch.from_numpy(logps[f"{kind}/log-probs"]).requires_grad_()
            sums = torch.stack([x.sum() for x in of_tokens.split(self.workload.lengths)]).chunk(2)
            zeros = torch.zeros_like(sums[0])
            loss = ops.preference_loss(*sums, zeros, zeros).loss
            (gradient,) = torch.autograd.grad(loss, of_tokens)
            self.head.inputs.grad_logps = gradient.float().to(self.head.inputs.hidden.device)
            arrays[f"{kind}/loss"] = loss.detach().numpy()
        of_head = self.head.check()
        return arrays | {name: x for name, x in of_head.items() if not name.endswith("/log-probs")}
