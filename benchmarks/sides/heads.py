"""LM heads of several libraries: log-probs of targets from hidden states, forward and backward."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Arrays, Unavailable
from benchmarks.sides import workload as w
from fastdpo import ops
from fastdpo.accuracy import error
from fastdpo.ops import TokenLogps, definitions
from fastdpo.ops.head.results import LOGGED_STATISTICS

PROJECTIONS = 16
ROWS_PER_CHUNK = 256
COMPARED_ROWS = 256
"""In 16 bits, the number of rows of the gradient of hidden states that are compared."""
ALLOWED_16_BIT_ERROR = 4
"""Times the error of plain PyTorch.

Some libraries accumulate the gradient of the weight in 16 bits.
"""
TRL_CHUNK = 32_768
"""The chunk of the vocabulary that `trl.trainer.utils` uses."""
LOGIT_SPREAD = 3.0
"""Standard deviation of the logits: 200 of 100,000 entries have half of the probability."""
LOG_ODDS, LOG_ODDS_SPREAD = 1.0, 2.0
"""Mean and standard deviation of the log-odds of targets, whose mean probability then is 0.65."""
OUTPUT_LABELS = {"logps": "log-probs", "entropy": "entropy", "mean_logits": "mean logit", "is_top1": "top-1 accuracy"}


class Head(Protocol):
    """hidden [N, D], weight [V, D] and targets [N] to results per token [N]."""

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenLogps: ...


@dataclass(frozen=True)
class HeadWorkload:
    """Size and dtype of a head.

    Attributes:
        n: number of scored tokens, N.
        v: size of the vocabulary, V.
        d: hidden size, D.
        trainable: whether the weight needs a gradient. Under LoRA it does not.
        dtype: dtype of hidden states and weight.
        statistics: what is computed in addition to log-probs.
        summed: whether only the sum of all log-probs is needed, as in SFT. The gradient of each
            log-prob is then 1, which some heads take in their forward pass.
    """

    n: int
    v: int
    d: int
    trainable: bool
    dtype: str = "float32"
    statistics: tuple[str, ...] = ()
    summed: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("logps", *self.statistics)

    def __str__(self) -> str:
        kind = ["trainable" if self.trainable else "frozen"]
        if self.statistics:
            kind.append("statistics" if self.statistics == LOGGED_STATISTICS else " and ".join(self.statistics))
        if self.summed:
            kind.append("summed")
        return f"N {self.n:,}, V {self.v:,}, D {self.d:,}, {', '.join(kind)}"


class HeadInputs:
    """Inputs that are equal in every process.

    Attributes:
        hidden: [N, D].
        weight: [V, D].
        targets: [N].
        grad_logps: [N] float32, the gradient that reaches the log-probs. Ones if they are summed.
        projections: [D, PROJECTIONS] float64, random vectors.
        compared: slice of the rows whose gradients are compared.
    """

    def __init__(self, workload: HeadWorkload) -> None:
        n, v, d = workload.n, workload.v, workload.d
        device, dtype = w.device(), getattr(torch, workload.dtype)
        on_device = {"generator": torch.Generator(device).manual_seed(0), "device": device}
        self.weight = (torch.randn(v, d, **on_device) * d**-0.5).to(dtype)
        self.targets = torch.randint(0, v, (n,), **on_device)
        self.hidden = self._hidden(on_device).to(dtype)
        self.grad_logps = torch.ones(n, device=device) if workload.summed else torch.randn(n, **on_device)
        self.projections = torch.randn(d, PROJECTIONS, dtype=torch.float64, **on_device)
        self.compared = slice(None) if dtype == torch.float32 else slice(0, n, max(1, n // COMPARED_ROWS))

    def _hidden(self, on_device: dict[str, Any]) -> Tensor:
        """Hidden states whose logits are like those of a trained model. Libraries may skip small gradients.

        Logits are normally distributed, and those of targets are raised to their log-odds.
        """
        n, (v, d) = len(self.targets), self.weight.shape
        hidden = LOGIT_SPREAD * torch.randn(n, d, **on_device)
        log_odds = LOG_ODDS + LOG_ODDS_SPREAD * torch.randn(n, **on_device)
        rows = self.weight[self.targets].float()  # [N, D]
        raised = log_odds + math.log(v) + LOGIT_SPREAD**2 / 2 - (hidden * rows).sum(1)
        return hidden + rows * (raised / rows.square().sum(1))[:, None]

    def project(self, grad_weight: Tensor) -> Tensor:
        """[V, PROJECTIONS]: the weight's gradient times random vectors; has its relative error."""
        return grad_weight.double() @ self.projections


def build_torch(workload: HeadWorkload, compiled: bool = False) -> Head:
    """All logits and their log-softmax. `log_softmax` and `nll_loss` are what `cross_entropy` runs."""
    statistics, reduction = workload.statistics, "sum" if workload.summed else "none"

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenLogps:
        logits = F.linear(hidden, weight).float()  # [N, V]
        logp = logits.log_softmax(-1)
        logps = -F.nll_loss(logp, targets, reduction=reduction)
        with torch.no_grad():  # TRL logs the statistics
            return TokenLogps(
                logps,
                entropy=-(logp.exp() * logp).sum(-1) if "entropy" in statistics else None,
                mean_logits=logits.mean(-1) if "mean_logits" in statistics else None,
                is_top1=logits.argmax(-1) == targets if "is_top1" in statistics else None,
            )

    if not compiled:
        return head
    if not torch.cuda.is_available() and shutil.which("c++") is None:
        raise Unavailable("torch.compile needs a C++ compiler")
    return torch.compile(head, dynamic=True)  # N differs from batch to batch


def build_trl(workload: HeadWorkload) -> Head:
    from trl.kernels import ChunkedLogProbFunction

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenLogps:
        logps, entropy, _, mean_logits, is_top1 = ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, workload.statistics
        )
        return TokenLogps(logps, entropy, mean_logits, is_top1)

    return head


def build_torch_fused(workload: HeadWorkload) -> Head:
    _require_log_probs_only(workload)
    fused = getattr(F, "linear_cross_entropy", None)
    if fused is None:
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy")
    # What the documentation of the options says: elsewhere the path without them is cheaper.
    chunked = workload.n >= workload.d and workload.v > workload.d
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None
    return _negated(partial(fused, options=options), workload)


def build_cut_cross_entropy(workload: HeadWorkload) -> Head:
    _require_log_probs_only(workload)
    _require_gpu()
    from cut_cross_entropy import linear_cross_entropy

    return _negated(linear_cross_entropy, workload)


def build_liger(workload: HeadWorkload) -> Head:
    _require_log_probs_only(workload)
    _require_gpu()
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return _negated(liger_fused_linear_cross_entropy, workload)


def build_liger_scaled(workload: HeadWorkload) -> Head:
    """It can also compute the entropy, and runs on every device."""
    if not {*workload.statistics} <= {"entropy"}:
        raise Unavailable("computes log-probs and entropy only")
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    if torch.cuda.is_available():
        import cutlass  # noqa: F401
    return_entropy = "entropy" in workload.statistics

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenLogps:
        results = LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, weight, targets, temperature=1.0, return_entropy=return_entropy
        )
        losses, entropy = results if return_entropy else (results, None)
        return TokenLogps(-losses, entropy)

    return head


def build_quack(workload: HeadWorkload) -> Head:
    """The chunked function of QuACK where the log-probs are summed, and else the one with a loss for each token."""
    _require_log_probs_only(workload)
    _require_gpu()
    from quack.linear_cross_entropy import chunked_linear_cross_entropy, linear_cross_entropy_func

    if workload.summed:
        return _negated(chunked_linear_cross_entropy, workload)

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return linear_cross_entropy_func(hidden, weight, None, targets, reduction=reduction)

    return _negated(loss, workload)


def _negated(loss: Callable[..., Tensor], workload: HeadWorkload) -> Head:
    """The head of a function that returns negative log-probs, or their sum."""
    reduction = "sum" if workload.summed else "none"

    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenLogps:
        return TokenLogps(-loss(hidden, weight, targets, reduction=reduction))

    return head


def _require_log_probs_only(workload: HeadWorkload) -> None:
    if workload.statistics:
        raise Unavailable("computes log-probs only")


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise Unavailable("its kernels need a GPU")


def build_fastdpo(workload: HeadWorkload, memory_budget: int | None = None) -> Head:
    return partial(ops.linear_logps, outputs=workload.outputs, memory_budget=memory_budget)


PEERS: dict[str, Callable[..., Head]] = {
    "plain PyTorch": build_torch,
    "plain PyTorch, compiled": partial(build_torch, compiled=True),
    "TRL": build_trl,
    "torch linear_cross_entropy": build_torch_fused,
    "cut-cross-entropy": build_cut_cross_entropy,
    "Liger": build_liger,
    "Liger, scaled": build_liger_scaled,
    "QuACK": build_quack,
    "fastdpo": build_fastdpo,
}
DESCRIPTIONS = {
    "plain PyTorch": "`linear`, then `log_softmax` and `nll_loss` (together `cross_entropy`) on all logits in float32, "
    "and each requested statistic from the same log-softmax without gradients.",
    "plain PyTorch, compiled": "the same under `torch.compile(dynamic=True)`.",
    "TRL": "`trl.kernels.ChunkedLogProbFunction`, the head of TRL's own trainers, with the chunks that they use; on a "
    "CPU, its tiles are folded by torch's operators instead of Triton.",
    "torch linear_cross_entropy": "`torch.nn.functional.linear_cross_entropy`, chunked (`LinearCrossEntropyOptions()`) "
    "where N is at least D, and else without options, as torch's documentation advises. In the times above, N 256 was "
    "still chunked.",
    "cut-cross-entropy": "`linear_cross_entropy` with its defaults, which skip small gradients.",
    "Liger": "`liger_fused_linear_cross_entropy` with its defaults.",
    "Liger, scaled": "`LigerFusedLinearScaledCrossEntropyFunction` of Liger, which returns a loss and, if requested, "
    "the entropy of each token; a CUDA kernel on sm90, elsewhere torch's operators on chunks of 512 tokens. There, the "
    "entropy is `logsumexp` minus the mean of the logits under their softmax, and the rounding that the probabilities "
    "of a row share is multiplied by the size of the logits, which are not shifted by their maximum.",
    "QuACK": "`linear_cross_entropy_func`, which stores all logits, or, where log-probs are summed, "
    "`chunked_linear_cross_entropy`, which returns a sum or mean only.",
    "fastdpo": "`fastdpo.ops.linear_logps`.",
}


def plain_head(hidden: Tensor, weight: Tensor, targets: Tensor, outputs: tuple[str, ...] = ("logps",)) -> TokenLogps:
    """The definition of the op, the measure of correct sides."""
    return definitions.linear_logps(hidden, weight, targets, outputs=outputs)


def named_arrays(
    results: TokenLogps, outputs: tuple[str, ...], grad_hidden: Tensor, grad_weight: Tensor | None
) -> Arrays:
    """The quantities that all heads must agree on, as float64 arrays:

    `results` [N] and gradients.
    """
    quantities = {OUTPUT_LABELS[name]: getattr(results, name) for name in outputs}
    quantities |= {"gradient of hidden states": grad_hidden}
    if grad_weight is not None:
        quantities["gradient of the weight"] = grad_weight
    return {name: x.detach().double().cpu().numpy() for name, x in quantities.items()}


class HeadStep:
    """Forward and backward of one head."""

    batches = 1

    def __init__(self, workload: HeadWorkload, peer: str, **options: Any) -> None:
        self.head = PEERS[peer](workload, **options)
        self.inputs = HeadInputs(workload)
        self.inputs.hidden.requires_grad_()
        self.inputs.weight.requires_grad_(workload.trainable)
        self.workload = workload
        self.launch_seconds: list[float] = []

    def _run(self) -> tuple[TokenLogps, tuple[Tensor, ...]]:
        x = self.inputs
        results = self.head(x.hidden, x.weight, x.targets)
        leaves = (x.hidden, x.weight) if self.workload.trainable else (x.hidden,)
        if self.workload.summed:
            results = results._replace(logps=results.logps.sum())
            return results, torch.autograd.grad(results.logps, leaves)
        return results, torch.autograd.grad(results.logps, leaves, x.grad_logps)

    def check(self) -> Arrays:
        results, (grad_hidden, *grad_weight) = self._run()
        projected = self.inputs.project(grad_weight[0]) if grad_weight else None
        return named_arrays(results, self.workload.outputs, grad_hidden[self.inputs.compared], projected)

    def step(self, batch: int) -> None:
        start = perf_counter()
        self._run()
        self.launch_seconds.append(perf_counter() - start)

    def reset(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        """On a GPU, the median of the seconds that the host needs to launch a step."""
        return {"launch_seconds": median(self.launch_seconds)} if self.inputs.hidden.is_cuda else {}


class ExactHead:
    """The definition in float64 ("exact") and in the sides' dtype ("plain"), in chunks of rows."""

    batches = 1

    def __init__(self, workload: HeadWorkload) -> None:
        self.workload = workload
        self.inputs = HeadInputs(workload)

    def check(self) -> Arrays:
        dtype = self.inputs.hidden.dtype
        plain = self._run(dtype, self.workload.n if dtype == torch.float32 else ROWS_PER_CHUNK)
        exact = self._run(torch.float64, ROWS_PER_CHUNK) if dtype == torch.float32 else self._run_from_16_bit_logits()
        if self.workload.summed:
            for arrays in (plain, exact):
                arrays["log-probs"] = np.array(arrays["log-probs"].sum())
        arrays = {f"exact/{name}": x for name, x in exact.items()} | {f"plain/{name}": x for name, x in plain.items()}
        if "entropy" in exact:
            # Heads may subtract sum p z from the logsumexp, in float32. Both are about this large.
            size = math.log(self.workload.v) + LOGIT_SPREAD**2 / 2
            scale = np.sqrt(np.square(exact["entropy"]).mean())
            arrays["slack/entropy"] = np.array(2 * torch.finfo(torch.float32).eps * size / scale)
        if dtype != torch.float32:
            for name, x in exact.items():
                plain_error = error(torch.from_numpy(plain[name]), torch.from_numpy(x))
                arrays[f"slack/{name}"] = np.array((ALLOWED_16_BIT_ERROR - 2) * plain_error)
        return arrays

    def _run(self, dtype: torch.dtype, rows_per_chunk: int) -> Arrays:
        x = self.inputs
        weight = x.weight.to(dtype, copy=True).requires_grad_(self.workload.trainable)
        accumulator_dtype = torch.promote_types(dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=accumulator_dtype) if self.workload.trainable else None
        results, grad_hidden = [], []
        for rows in torch.arange(len(x.hidden)).split(rows_per_chunk):
            hidden = x.hidden[rows].to(dtype, copy=True).requires_grad_()
            of_rows = plain_head(hidden, weight, x.targets[rows], self.workload.outputs)
            leaves = (hidden,) if grad_weight is None else (hidden, weight)
            grads = torch.autograd.grad(of_rows.logps, leaves, x.grad_logps[rows].to(of_rows.logps.dtype))
            results.append(TokenLogps(*(None if value is None else value.detach() for value in of_rows)))
            grad_hidden.append(grads[0])
            if grad_weight is not None:
                grad_weight += grads[1]
        projected = None if grad_weight is None else x.project(grad_weight)
        compared = torch.cat(grad_hidden)[x.compared]
        return named_arrays(_concatenate(results), self.workload.outputs, compared, projected)

    def _run_from_16_bit_logits(self) -> Arrays:
        """Logits are 16-bit products summed in float32; everything after them is float64."""
        x, projected = self.inputs, None
        if self.workload.trainable:
            projected = torch.zeros(len(x.weight), PROJECTIONS, dtype=torch.float64, device=x.weight.device)
        weight, results, grad_hidden = x.weight.double(), [], []
        compared = torch.zeros(len(x.hidden), dtype=torch.bool, device=weight.device)
        compared[x.compared] = True
        for rows in torch.arange(len(x.hidden), device=weight.device).split(ROWS_PER_CHUNK):
            h, y = x.hidden[rows], x.targets[rows]
            logits = torch.mm(h, x.weight.t(), out_dtype=torch.float32).double()
            results.append(definitions.token_logps(logits, y, outputs=self.workload.outputs))
            grad_logits = -logits.softmax(-1)
            grad_logits[torch.arange(len(y), device=y.device), y] += 1
            grad_logits *= x.grad_logps[rows, None].double()
            grad_hidden.append(grad_logits[compared[rows]] @ weight)
            if projected is not None:
                projected += grad_logits.t() @ (h.double() @ x.projections)
        return named_arrays(_concatenate(results), self.workload.outputs, torch.cat(grad_hidden), projected)


def _concatenate(results: list[TokenLogps]) -> TokenLogps:
    columns = zip(*results, strict=True)
    return TokenLogps(*(None if column[0] is None else torch.cat(column) for column in columns))
