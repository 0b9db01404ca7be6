"""Log-probabilities straight from hidden states, forward and backward, as several libraries compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import Arrays, Unavailable
from fastdpo import ops
from fastdpo.testing import error

SKETCH = 16
ROWS = 256
SAMPLE = 256  # tokens whose gradient is compared where all would take too long in float64
PEERS_SUM_LESS_WELL = 4  # times the error of plain PyTorch in bfloat16: some add up the head's gradient in it
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
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"N {self.n:,}, V {self.v:,}, D {self.d:,}, {'trainable' if self.trainable else 'frozen'}"


class Inputs:
    """The same in every process. `cotangent` [N] is the gradient that reaches the log-probabilities."""

    def __init__(self, workload: HeadWorkload) -> None:
        n, v, d = workload.n, workload.v, workload.d
        device, dtype = torch.accelerator.current_accelerator() or torch.device("cpu"), getattr(torch, workload.dtype)
        on_device = {"generator": torch.Generator(device).manual_seed(0), "device": device}
        self.hidden = torch.randn(n, d, **on_device).to(dtype)
        self.weight = (torch.randn(v, d, **on_device) * d**-0.5).to(dtype)
        self.targets = torch.randint(0, v, (n,), **on_device)
        self.cotangent = torch.randn(n, **on_device)
        self.probe = torch.randn(d, SKETCH, dtype=torch.float64, **on_device)
        self.compared = slice(None) if dtype == torch.float32 else slice(0, n, max(1, n // SAMPLE))

    def sketch(self, grad_weight: Tensor) -> Tensor:
        """[V, SKETCH]: products of the weight's gradient with random vectors, which err as much as it does."""
        return grad_weight.double() @ self.probe


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return ops.reference.linear_logps(hidden, weight, targets).logps


def build_torch() -> Head:
    return plain


def build_trl() -> Head:
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ImportError as reason:
        raise Unavailable(f"not installed ({reason})") from None

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
    except ImportError as reason:
        raise Unavailable(f"not installed ({reason})") from None
    _require_gpu_for_triton(impl == "cce")

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return -linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl)

    return head


def build_liger() -> Head:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused
    except ImportError as reason:
        raise Unavailable(f"not installed ({reason})") from None
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
        self.launched: list[float] = []

    def _run(self) -> tuple[Tensor, ...]:
        x = self.inputs
        logps = self.head(x.hidden, x.weight, x.targets)
        wanted = (x.hidden, x.weight) if self.workload.trainable else (x.hidden,)
        return logps.detach(), *torch.autograd.grad(logps, wanted, x.cotangent)

    def check(self) -> Arrays:
        logps, grad_hidden, *grad_weight = self._run()
        found = {"log-probs": logps, "gradient of hidden": grad_hidden[self.inputs.compared]}
        if grad_weight:
            found["gradient of the head"] = self.inputs.sketch(grad_weight[0])
        return {name: x.double().cpu().numpy() for name, x in found.items()}

    def step(self, batch: int) -> None:
        start = perf_counter()
        self._run()
        self.launched.append(perf_counter() - start)

    def rest(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        """On a GPU the seconds that the host takes to launch a step's kernels, the median."""
        return {"launch_seconds": median(self.launched)} if self.inputs.hidden.is_cuda else {}


class ExactHead:
    """The definition in float64 and in the sides' dtype, a few rows at a time: "exact" and "plain"."""

    batches = 1

    def __init__(self, workload: HeadWorkload) -> None:
        self.workload = workload
        self.inputs = Inputs(workload)

    def check(self) -> Arrays:
        dtype = self.inputs.hidden.dtype
        plain = self._run(dtype, self.workload.n if dtype == torch.float32 else ROWS)
        exact = self._run(torch.float64, ROWS) if dtype == torch.float32 else self._products_of_halves()
        found = {
            f"{kind}/{name}": x for kind, run in {"exact": exact, "plain": plain}.items() for name, x in run.items()
        }
        if dtype != torch.float32:
            for name, x in exact.items():
                off = error(torch.from_numpy(plain[name]), torch.from_numpy(x))
                found[f"slack/{name}"] = np.array((PEERS_SUM_LESS_WELL - 2) * off)
        return found

    def _run(self, dtype: torch.dtype, rows_at_once: int) -> Arrays:
        x = self.inputs
        weight = x.weight.to(dtype, copy=True).requires_grad_(self.workload.trainable)
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros_like(weight, dtype=wide) if self.workload.trainable else None
        logps, grads = [], []
        for rows in torch.arange(len(x.hidden)).split(rows_at_once):
            hidden = x.hidden[rows].to(dtype, copy=True).requires_grad_()
            of_rows = plain(hidden, weight, x.targets[rows])
            wanted = (hidden,) if total is None else (hidden, weight)
            grad, *of_weight = torch.autograd.grad(of_rows, wanted, x.cotangent[rows].to(of_rows.dtype))
            logps.append(of_rows.detach())
            grads.append(grad)
            if total is not None:
                total += of_weight[0]
        return self._named(torch.cat(logps), torch.cat(grads)[x.compared], None if total is None else x.sketch(total))

    def _products_of_halves(self) -> Arrays:
        """Logits are products of 16-bit numbers summed in float32, all that follows is float64."""
        x, sketch = self.inputs, None
        if self.workload.trainable:
            sketch = torch.zeros(len(x.weight), SKETCH, dtype=torch.float64, device=x.weight.device)
        weight, logps, grads = x.weight.double(), [], []
        compared = torch.zeros(len(x.hidden), dtype=torch.bool, device=weight.device)
        compared[x.compared] = True
        for rows in torch.arange(len(x.hidden), device=weight.device).split(ROWS):
            h, y = x.hidden[rows], x.targets[rows, None]
            logp = torch.mm(h, x.weight.t(), out_dtype=torch.float32).double().log_softmax(-1)
            logps.append(logp.gather(1, y)[:, 0])
            of_logits = (-logp.exp()).scatter_add_(1, y, torch.ones_like(logp[:, :1])) * x.cotangent[
                rows, None
            ].double()
            grads.append(of_logits[compared[rows]] @ weight)
            if sketch is not None:
                sketch += of_logits.t() @ (h.double() @ x.probe)
        return self._named(torch.cat(logps), torch.cat(grads), sketch)

    def _named(self, logps: Tensor, grad_hidden: Tensor, sketch: Tensor | None) -> Arrays:
        found = {"log-probs": logps, "gradient of hidden": grad_hidden}
        if sketch is not None:
            found["gradient of the head"] = sketch
        return {name: value.double().cpu().numpy() for name, value in found.items()}
