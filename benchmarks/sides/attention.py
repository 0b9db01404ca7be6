"""One layer's attention over a batch of pairs, forward and backward: padded; packed, with prompts shared and not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Arrays, Unavailable
from benchmarks.sides.workload import Lengths
from fastdpo.ops import attention_backends, attention_flash, packed_attention

QUANTITIES = ("gradient of queries", "gradient of keys", "gradient of values", "output")


@dataclass(frozen=True)
class AttentionWorkload:
    """Pairs of these lengths, and the shape of a layer's heads."""

    pairs: tuple[Lengths, ...]
    heads: int = 32
    kv_heads: int = 8
    d: int = 128
    dtype: str = "bfloat16"


class Inputs:
    """The same for all sides: q, k, v and the gradient of the output, [T, heads, D], of the distinct tokens.

    `rows` holds for each row of a padded batch which of them it consists of, prompt and answer.
    """

    def __init__(self, workload: AttentionWorkload) -> None:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self.rows: list[Tensor] = []
        self.layout: list[tuple[int, int, int, int]] = []
        end = 0
        for prompt, chosen, rejected in workload.pairs:
            start, own = end, end + prompt + chosen
            end = own + rejected
            shared = torch.arange(start, start + prompt)
            self.rows += [torch.arange(start, own), torch.cat([shared, torch.arange(own, end)])]
            self.layout += [(0, 0, start, own - start), (start, prompt, own, rejected)]
        generator = torch.Generator(device).manual_seed(0)
        heads = (workload.heads, workload.kv_heads, workload.kv_heads, workload.heads)
        dtype = getattr(torch, workload.dtype)
        shapes = ((end, n, workload.d) for n in heads)
        self.tensors = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


class _Step:
    """Attention over tokens of which `index` [...] says which distinct token each is; -1 where it is padding."""

    batches = 1

    def __init__(self, inputs: Inputs, index: Tensor) -> None:
        device = inputs.tensors[0].device
        self.tokens, self.index = len(inputs.tensors[0]), index.to(device)
        *leaves, grad = ((x[self.index] * (self.index >= 0)[..., None, None]).detach() for x in inputs.tensors)
        seen = torch.zeros(self.tokens + 1, dtype=torch.bool)
        first = torch.zeros(index.numel(), dtype=torch.bool)
        for place, token in enumerate(index.flatten().tolist()):
            first[place] = token >= 0 and not seen[token]
            seen[token] = True
        self.first = first.to(device).view(index.shape)
        self.leaves = [x.requires_grad_() for x in leaves]
        self.grad = grad * self.first[..., None, None]  # of a token's copies, one is asked for

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError

    def _run(self) -> tuple[Tensor, ...]:
        out = self.attend(*self.leaves)
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)

    def check(self) -> Arrays:
        out, *grads = self._run()
        found = (*grads, out * self.first[..., None, None])
        return {name: self._by_token(x) for name, x in zip(QUANTITIES, found, strict=True)}

    def _by_token(self, x: Tensor) -> Any:
        """Summed over the copies of each token, in float64."""
        total = torch.zeros(self.tokens + 1, *x.shape[self.index.dim() :], dtype=torch.float64, device=x.device)
        total.index_add_(0, self.index.flatten() % (self.tokens + 1), x.flatten(0, self.index.dim() - 1).double())
        return total[: self.tokens].cpu().numpy()

    def step(self, batch: int) -> None:
        self._run()

    def rest(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {"tokens": self.index.numel()}


class Padded(_Step):
    """torch's attention over rows padded on the right, where causality alone hides the padding."""

    def __init__(self, workload: AttentionWorkload) -> None:
        inputs = Inputs(workload)
        super().__init__(inputs, torch.nn.utils.rnn.pad_sequence(inputs.rows, batch_first=True, padding_value=-1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


class Packed(_Step):
    """The op of fastdpo, with one of its backends."""

    def __init__(self, workload: AttentionWorkload, shared: bool, backend: str = "") -> None:
        inputs = Inputs(workload)
        if backend:
            query, _, value, _ = inputs.tensors
            options = attention_flash.Options(workload.d**-0.5, None, None)
            reason = attention_backends.refusal(backend, query, value, options)
            if reason is not None:
                raise Unavailable(reason)
        self.backend = backend
        if shared:
            super().__init__(inputs, torch.arange(len(inputs.tensors[0])))
            self.rows = torch.tensor(inputs.layout, dtype=torch.int32)
        else:
            super().__init__(inputs, torch.cat(inputs.rows))
            lengths = torch.tensor([len(row) for row in inputs.rows])
            zeros = torch.zeros_like(lengths)
            self.rows = torch.stack([zeros, zeros, lengths.cumsum(0) - lengths, lengths], 1).int()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(query, key, value, self.rows)

    def _run(self) -> tuple[Tensor, ...]:
        with _chosen(self.backend):
            return super()._run()


@contextmanager
def _chosen(backend: str) -> Iterator[None]:
    if backend:
        os.environ[attention_backends.VARIABLE] = backend
    try:
        yield
    finally:
        os.environ.pop(attention_backends.VARIABLE, None)


class Exact:
    """Row by row in float64, and in the sides' dtype: "exact" and "plain"."""

    batches = 1

    def __init__(self, workload: AttentionWorkload) -> None:
        self.workload, self.inputs = workload, Inputs(workload)

    def check(self) -> Arrays:
        dtype = self.inputs.tensors[0].dtype
        runs = {"exact": self._run(torch.float64), "plain": self._run(dtype)}
        return {f"{kind}/{name}": x for kind, run in runs.items() for name, x in run.items()}

    def _run(self, dtype: torch.dtype) -> Arrays:
        group = self.workload.heads // self.workload.kv_heads
        totals = [torch.zeros_like(x, dtype=torch.float64) for x in self.inputs.tensors]
        done = torch.zeros(len(totals[0]), dtype=torch.bool)
        for row in self.inputs.rows:
            asked = (~done[row]).to(totals[0].device)[None, :, None]
            done[row] = True
            row = row.to(totals[0].device)
            for kv_head in range(self.workload.kv_heads):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                of_keys = slice(kv_head, kv_head + 1)
                at = (heads, of_keys, of_keys, heads)
                pieces = (x[row, of] for x, of in zip(self.inputs.tensors, at, strict=True))
                found = self._of_row(*(x.to(dtype).transpose(0, 1) for x in pieces), asked)
                for total, of, x in zip(totals, at, found, strict=True):
                    total[:, of].index_add_(0, row, x.transpose(0, 1).double())
        return {name: x.cpu().numpy() for name, x in zip(QUANTITIES, totals, strict=True)}

    def _of_row(self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, asked: Tensor) -> tuple[Tensor, ...]:
        """Gradients and output, of the tokens that are asked for."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].mT * self.workload.d**-0.5
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril()
        out = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ leaves[2]
        return *torch.autograd.grad(out, leaves, grad * asked), out.detach() * asked
