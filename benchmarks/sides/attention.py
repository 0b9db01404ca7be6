"""Attention of one layer over a batch of pairs, forward and backward.

The sides are padded, packed without shared prompts, and packed with shared prompts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import DeviceType, ProfilerActivity, profile

from benchmarks.cases import Arrays, Unavailable
from benchmarks.sides import workload as w
from benchmarks.sides.workload import Lengths
from fastdpo.ops import packed_attention
from fastdpo.ops.attention import routes
from fastdpo.ops.attention.device_layout import AttentionOptions, Kind
from fastdpo.ops.choice import tuning

QUEUED_CYCLES = 20_000_000  # 10 ms
QUANTITIES = ("gradient of queries", "gradient of keys", "gradient of values", "output")


@dataclass(frozen=True)
class AttentionWorkload:
    """Lengths of the pairs, and the shape and dtype of a layer's heads.

    Attributes:
        compared: the number of key heads, from the first one on, that are compared with the ground truth together with
            their query heads; None for all.
        header: tokens that all rows begin with, before the prompts.
        window, softcap: as in `packed_attention`.
        deterministic: whether torch's deterministic algorithms are asked for.
    """

    pairs: tuple[Lengths, ...]
    heads: int = 32
    kv_heads: int = 8
    d: int = 128
    dtype: str = "bfloat16"
    compared: int | None = None
    header: int = 0
    window: int | None = None
    softcap: float | None = None
    deterministic: bool = False

    def compared_of(self, heads: int) -> int:
        """How many of the heads of a tensor are compared, given their number."""
        return heads if self.compared is None else heads // self.kv_heads * self.compared


class AttentionInputs:
    """Inputs that are equal for all sides.

    Attributes:
        tensors: queries, keys, values and the gradient of the output, [T, heads, D], of the T
            distinct tokens.
        rows: for each row of a padded batch the indices of its tokens among the distinct ones.
        layout: for each row the start and length of its prefix, then of its own tokens, as in
            `Layout.rows`.
    """

    def __init__(self, workload: AttentionWorkload) -> None:
        device = w.device()
        self.rows: list[Tensor] = []
        self.layout: list[tuple[int, int, int, int]] = []
        end = 0
        for prompt, chosen, rejected in workload.pairs:
            seen = workload.header if end else 0  # the first pair stores the header
            start, branch = end, end + workload.header - seen + prompt + chosen
            end = branch + rejected
            first = torch.cat([torch.arange(seen), torch.arange(start, branch)])
            before = workload.header + prompt  # what the rejected row shares
            self.rows += [first, torch.cat([first[:before], torch.arange(branch, end)])]
            self.layout += [(0, seen, start, branch - start), (start - seen, before, branch, rejected)]
        generator = torch.Generator(device).manual_seed(0)
        heads = (workload.heads, workload.kv_heads, workload.kv_heads, workload.heads)
        dtype = getattr(torch, workload.dtype)
        shapes = ((end, n, workload.d) for n in heads)
        self.tensors = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


class AttentionStep:
    """Forward and backward over tokens that are copies of distinct tokens.

    On a GPU, the clock is the GPU's: a layer of attention takes less time there than the host needs to launch it,
    which a model does ahead of time.

    Args:
        workload: which heads are compared.
        inputs: of the distinct tokens.
        index: [...] index of the distinct token at each place, -1 for padding.
    """

    batches = 1

    def __init__(self, workload: AttentionWorkload, inputs: AttentionInputs, index: Tensor) -> None:
        self.workload = workload
        device = inputs.tensors[0].device
        self.tokens, self.index = len(inputs.tensors[0]), index.to(device)
        *leaves, grad = ((x[self.index] * (self.index >= 0)[..., None, None]).detach() for x in inputs.tensors)
        seen = torch.zeros(self.tokens + 1, dtype=torch.bool)
        first_copy = torch.zeros(index.numel(), dtype=torch.bool)
        for place, token in enumerate(index.flatten().tolist()):
            first_copy[place] = token >= 0 and not seen[token]
            seen[token] = True
        self.first_copy = first_copy.to(device).view(index.shape)
        self.leaves = [x.requires_grad_() for x in leaves]
        self.grad = grad * self.first_copy[..., None, None]  # only the first copy of a token has an output gradient
        self.device_seconds = 0.0
        if device.type == "cuda":
            self.now = self._device_now

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError

    def _run(self) -> tuple[Tensor, ...]:
        torch.use_deterministic_algorithms(self.workload.deterministic, warn_only=True)
        try:
            out = self.attend(*self.leaves)
            return out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)
        finally:
            torch.use_deterministic_algorithms(False)

    def check(self) -> Arrays:
        out, *grads = self._run()
        quantities = (*grads, out * self.first_copy[..., None, None])
        return {name: self._sum_copies(x) for name, x in zip(QUANTITIES, quantities, strict=True)}

    def _sum_copies(self, x: Tensor) -> Any:
        """Sum over the copies of each distinct token, in float64, of the heads that are compared."""
        x = x[..., : self.workload.compared_of(x.shape[-2]), :]
        total = torch.zeros(self.tokens + 1, *x.shape[self.index.dim() :], dtype=torch.float64, device=x.device)
        total.index_add_(0, self.index.flatten() % (self.tokens + 1), x.flatten(0, self.index.dim() - 1).double())
        return total[: self.tokens].cpu().numpy()

    def step(self, batch: int) -> None:
        if not self.grad.is_cuda:
            self._run()
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(QUEUED_CYCLES)  # all kernels are queued when the first one begins
        start.record()
        self._run()
        end.record()
        end.synchronize()
        self.device_seconds += start.elapsed_time(end) / 1000

    def _device_now(self) -> float:
        return self.device_seconds

    def reset(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        """The tokens, whether a second run gives the same bits, and on a GPU the milliseconds of each kernel."""
        same = all(torch.equal(x, again) for x, again in zip(self._run(), self._run(), strict=True))
        found = {"tokens": self.index.numel(), "same_bits": same}
        return found | {"kernels": self._kernels()} if self.grad.is_cuda else found

    def _kernels(self) -> dict[str, float]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._run()
            torch.cuda.synchronize()
        times: Counter[str] = Counter()
        for event in profiler.key_averages():
            if event.device_type == DeviceType.CUDA:
                times[event.key.partition("<")[0]] += event.self_device_time_total / 1e3
        return dict(times.most_common())


class PaddedAttention(AttentionStep):
    """torch's attention over right-padded rows, where the causal mask alone hides the padding."""

    def __init__(self, workload: AttentionWorkload) -> None:
        if workload.softcap is not None:
            raise Unavailable("torch's attention has no softcap")
        inputs = AttentionInputs(workload)
        index = torch.nn.utils.rnn.pad_sequence(inputs.rows, batch_first=True, padding_value=-1)
        super().__init__(workload, inputs, index)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        length, window = query.shape[1], self.workload.window
        mask = None if window is None else _visible(length, length, window, query.device)
        out = F.scaled_dot_product_attention(*heads_first, mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2)


class PackedAttention(AttentionStep):
    """`fastdpo.ops.packed_attention`.

    Args:
        workload: lengths and shape.
        shared: whether the rows of a pair share their prompt.
        backend: name of a backend in `backends`; by default the op chooses.
    """

    def __init__(self, workload: AttentionWorkload, shared: bool, backend: str = "") -> None:
        inputs = AttentionInputs(workload)
        if backend:
            query, _, value, _ = inputs.tensors
            reason = routes.BACKENDS[backend].unsupported_reason(_kind(workload, query, value))
            if reason is not None:
                raise Unavailable(reason)
        self.backend = backend
        if shared:
            super().__init__(workload, inputs, torch.arange(len(inputs.tensors[0])))
            self.rows = torch.tensor(inputs.layout, dtype=torch.int32)
        else:
            super().__init__(workload, inputs, torch.cat(inputs.rows))
            lengths = torch.tensor([len(row) for row in inputs.rows])
            zeros = torch.zeros_like(lengths)
            self.rows = torch.stack([zeros, zeros, lengths.cumsum(0) - lengths, lengths], 1).int()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(
            query, key, value, self.rows, window=self.workload.window, softcap=self.workload.softcap
        )

    def _run(self) -> tuple[Tensor, ...]:
        with _selected_backend(self.backend):
            return super()._run()

    def facts(self) -> dict[str, Any]:
        """As of every side, whether a library passes its probe, and the choices of this process so far."""
        found = super().facts()
        if self.backend not in ("", routes.TRITON):
            query, _, value = self.leaves
            kind = _kind(self.workload, query, value)._replace(deterministic=self.workload.deterministic)
            found["passes_probe"] = routes.passes_probe(self.backend, kind.of_kernels)
        if not self.backend:
            found["choices"] = {call.noted: choice._asdict() for call, choice in tuning.choices.items()}
        return found


def _kind(workload: AttentionWorkload, query: Tensor, value: Tensor) -> Kind:
    return Kind.of(query, value, AttentionOptions(workload.d**-0.5, workload.window, workload.softcap))


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys]: which keys a query sees. Both end at the same position."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return visible if window is None else visible.triu(keys - queries - window + 1)


@contextmanager
def _selected_backend(name: str) -> Iterator[None]:
    if name:
        os.environ[routes.VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(routes.VARIABLE, None)


class ExactAttention:
    """Attention row by row, in float64 ("exact") and in the dtype of the sides ("plain")."""

    batches = 1

    def __init__(self, workload: AttentionWorkload) -> None:
        self.workload, self.inputs = workload, AttentionInputs(workload)

    def check(self) -> Arrays:
        dtype = self.inputs.tensors[0].dtype
        runs = {"exact": self._run(torch.float64), "plain": self._run(dtype)}
        return {f"{kind}/{name}": x for kind, run in runs.items() for name, x in run.items()}

    def _run(self, dtype: torch.dtype) -> Arrays:
        group = self.workload.heads // self.workload.kv_heads
        totals = [torch.zeros_like(x, dtype=torch.float64) for x in self.inputs.tensors]
        done = torch.zeros(len(totals[0]), dtype=torch.bool)
        for row in self.inputs.rows:
            first_copy = (~done[row]).to(totals[0].device)[None, :, None]
            done[row] = True
            row = row.to(totals[0].device)
            for kv_head in range(self.workload.compared_of(self.workload.kv_heads)):
                query_heads = slice(kv_head * group, (kv_head + 1) * group)
                key_heads = slice(kv_head, kv_head + 1)
                heads = (query_heads, key_heads, key_heads, query_heads)
                parts = (x[row, part] for x, part in zip(self.inputs.tensors, heads, strict=True))
                results = self._attend_row(*(x.to(dtype).transpose(0, 1) for x in parts), first_copy)
                for total, part, x in zip(totals, heads, results, strict=True):
                    total[:, part].index_add_(0, row, x.transpose(0, 1).double())
        compared = (x[:, : self.workload.compared_of(x.shape[1])] for x in totals)
        return {name: x.cpu().numpy() for name, x in zip(QUANTITIES, compared, strict=True)}

    def _attend_row(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, first_copy: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k and v, and the output at the first copies."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        scores, softcap = leaves[0] @ leaves[1].mT * self.workload.d**-0.5, self.workload.softcap
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = _visible(*scores.shape[1:], self.workload.window, scores.device)
        out = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ leaves[2]
        return *torch.autograd.grad(out, leaves, grad * first_copy), out.detach() * first_copy
