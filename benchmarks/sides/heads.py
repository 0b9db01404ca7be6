"""Log-probabilities straight from hidden states, forward and backward, as several libraries compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Arrays, Unavailable
from fastdpo import ops

SKETCH = 16
ROWS = 256
TRL_CHUNK = 32_768  # what trl.trainer.utils passes

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden [N, D], weight [V, D], targets [N] to log-probabilities [N]."""


@dataclass(frozen=True)
class HeadWorkload:
    """N scored tokens, V words, D hidden size; a head that is not trainable is one under LoRA."""

    n: int
    v: int
    d: int
    trainable: bool

    def __str__(self) -> str:
        return f"N {self.n:,}, V {self.v:,}, D {self.d:,}, {'trainable' if self.trainable else 'frozen'}"


class Inputs:
    """The same in every process. `cotangent` [N] is the gradient that reaches the log-probabilities."""

    def __init__(self, workload: HeadWorkload) -> None:
        n, v, d = workload.n, workload.v, workload.d
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(n, d, generator=generator).to(device)
        self.weight = (torch.randn(v, d, generator=generator) * d**-0.5).to(device)
        self.targets = torch.randint(0, v, (n,), generator=generator).to(device)
        self.cotangent = torch.randn(n, generator=generator).to(device)
        self.probe = torch.randn(d, SKETCH, generator=generator, dtype=torch.float64).to(device)

    def sketch(self, grad_weight: Tensor) -> Tensor:
        """[V, SKETCH]: products of the weight's gradient with random vectors, which err as much as it does."""
        return grad_weight.double() @ self.probe


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return ops.reference.linear_logps(hidden, weight, targets).logps


def build_torch() -> Head:
    return plain


def build_trl() -> Head:
    from trl.kernels import ChunkedLogProbFunction

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ("log_probs",))[0]

    return head


def build_torch_fused() -> Head:
    fused = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if fused is None:
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -fused(hidden, weight, targets, reduction="none", options=options)

    return head


def build_cut_cross_entropy(impl: str) -> Head:
    try:
        from cut_cross_entropy import linear_cross_entropy
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from None
    _require_gpu_for_triton(impl == "cce")

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl)

    return head


def build_liger() -> Head:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from None
    _require_gpu_for_triton(True)

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -fused(hidden, weight, targets, reduction="none")

    return head


def _require_gpu_for_triton(is_triton: bool) -> None:
    if is_triton and not torch.cuda.is_available():
        raise Unavailable("its Triton kernels need a GPU")


def build_fastdpo(memory_budget: int = ops.MEMORY_BUDGET) -> Head:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return ops.linear_logps(hidden, weight, targets, memory_budget=memory_budget).logps

    return head


PEERS: dict[str, Callable[..., Head]] = {
    "plain PyTorch": build_torch,
    "TRL": build_trl,
    "torch linear_cross_entropy": build_torch_fused,
    "cut-cross-entropy": partial(build_cut_cross_entropy, "cce"),
    "cut-cross-entropy, torch_compile": partial(build_cut_cross_entropy, "torch_compile"),
    "Liger": build_liger,
    "fastdpo": build_fastdpo,
}


class HeadStep:
    """Forward and backward of one peer."""

    batches = 1

    def __init__(self, workload: HeadWorkload, peer: str, **options: Any) -> None:
        self.head = PEERS[peer](**options)
        self.inputs = Inputs(workload)
        self.inputs.hidden.requires_grad_()
        self.inputs.weight.requires_grad_(workload.trainable)
        self.workload = workload

    def _run(self) -> tuple[Tensor, ...]:
        x = self.inputs
        logps = self.head(x.hidden, x.weight, x.targets)
        wanted = (x.hidden, x.weight) if self.workload.trainable else (x.hidden,)
        return logps.detach(), *torch.autograd.grad(logps, wanted, x.cotangent)

    def check(self) -> Arrays:
        logps, grad_hidden, *grad_weight = self._run()
        found = {"log-probs": logps, "gradient of hidden": grad_hidden}
        if grad_weight:
            found["gradient of the head"] = self.inputs.sketch(grad_weight[0])
        return {name: x.cpu().numpy() for name, x in found.items()}

    def step(self, batch: int) -> None:
        self._run()

    def rest(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {}


class ExactHead:
    """The definition in float64, a few rows at a time, and in float32, all rows at once: "exact" and "plain"."""

    batches = 1

    def __init__(self, workload: HeadWorkload) -> None:
        self.workload = workload
        self.inputs = Inputs(workload)

    def check(self) -> Arrays:
        runs = {"exact": self._run(torch.float64, ROWS), "plain": self._run(torch.float32, self.workload.n)}
        return {f"{kind}/{name}": x for kind, run in runs.items() for name, x in run.items()}

    def _run(self, dtype: torch.dtype, rows_at_once: int) -> Arrays:
        x = self.inputs
        hidden = x.hidden.to(dtype, copy=True).requires_grad_()
        weight = x.weight.to(dtype, copy=True).requires_grad_(self.workload.trainable)
        logps = []
        for rows in torch.arange(len(hidden)).split(rows_at_once):
            of_rows = plain(hidden[rows], weight, x.targets[rows])
            of_rows.backward(x.cotangent[rows].to(dtype))
            logps.append(of_rows.detach())
        found = {"log-probs": torch.cat(logps), "gradient of hidden": hidden.grad}
        if self.workload.trainable:
            found["gradient of the head"] = x.sketch(weight.grad)
        return {name: value.cpu().numpy() for name, value in found.items()}
