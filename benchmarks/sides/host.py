"""A DPO step whose tensors are tiny: what remains is the time of the host.

On a CPU, attention of fastdpo takes the path that it takes on a GPU, with a library of flash attention and kernels
that launch nothing and return memory that exists. Steps are checked before, on the path of a CPU.
"""

from __future__ import annotations

import time
from collections import Counter
from cProfile import Profile
from pstats import Stats
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Arrays, Unavailable
from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import Workload
from fastdpo.kernels import gather_keys
from fastdpo.ops.attention import backends, calls
from fastdpo.ops.attention.calls import AttentionOptions
from fastdpo.ops.attention.flash import FlashAttention2, FlashLibrary
from fastdpo.ops.attention.layout_cache import LayoutCache

PROFILED = 3  # steps
PARTS = (  # of a path, and the name of a part; the first that fits
    ("/fastdpo/ops/attention/", "fastdpo: attention"),
    ("/fastdpo/ops/", "fastdpo: head and loss"),
    ("/fastdpo/models/", "fastdpo: models"),
    ("/fastdpo/packing.py", "fastdpo: packing"),
    ("/fastdpo/prefix_tree.py", "fastdpo: packing"),
    ("/fastdpo/", "fastdpo: trainer"),
    ("/transformers/", "transformers"),
    ("/trl/", "TRL"),
    ("/peft/", "PEFT"),
    ("/accelerate/", "accelerate"),
    ("/torch/", "torch and its operators"),
    ("/benchmarks/", "in the place of launches"),
)
OTHER = "others"


class HostStep(TrainerStep):
    """See `TrainerStep`. `seconds` of a step are those of the process on all its cores."""

    now = staticmethod(time.process_time)

    def __init__(self, workload: Workload, mode: str) -> None:
        if torch.accelerator.is_available():
            raise Unavailable("the time of the host is measured on machines without an accelerator")
        super().__init__(workload, mode)

    def check(self) -> Arrays:
        arrays = super().check()
        self.launches = replace_launches()
        for _ in range(2):
            self._run(0)
            self.reset()
        return arrays

    def facts(self) -> dict[str, Any]:
        """Adds the number of attention's launches in a step that were replaced, and the profile."""
        facts = super().facts()
        self.launches.clear()
        self._run(0)
        self.reset()
        return facts | {"launches": len(self.launches), "profile": self._profile()}

    def _profile(self) -> dict[str, float]:
        """The share of each part, from Python's profiler. An operator is of the part that calls it."""
        profile = Profile()
        for _ in range(PROFILED):
            profile.runcall(self._run, 0)
            self.reset()
        times: Counter[str] = Counter()
        for (path, *_), (_, _, own, _, callers) in Stats(profile).stats.items():  # pyright: ignore[reportAttributeAccessIssue]
            if path != "~":
                times[part_of(path)] += own
                continue
            for (caller, *_), (_, _, own_of_caller, _) in callers.items():
                times[part_of(caller)] += own_of_caller
        return {name: seconds / times.total() for name, seconds in times.most_common()}


def part_of(path: str) -> str:
    return next((name for folder, name in PARTS if folder in path), OTHER)


def replace_launches() -> list[str]:
    """From now on, attention on the CPU takes the path of a GPU, without its launches, which are listed."""
    launches: list[str] = []
    memory: dict[tuple[int, ...], Tensor] = {}

    def existing(*shape: int) -> Tensor:
        if shape not in memory:
            memory[shape] = torch.zeros(shape)
        return memory[shape].detach()

    def forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes,
    ):  # fmt: skip
        launches.append("forward")
        return existing(len(q), q.shape[1], v.shape[2]), existing(q.shape[1], len(q))

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # fmt: skip
        launches.append("backward")
        for gradient in (dq, dk, dv):
            gradient.zero_()

    def gathered(places: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(existing(places, *x.shape[1:]) for x in tensors)

    functions: Any = SimpleNamespace(**dict(zip(FlashAttention2.function_names, (forward, backward), strict=True)))
    for module in (backends, calls):
        module.suits_triton = lambda device, dtype: True
    backends._plans = LayoutCache(backends.KEPT_PLANS)  # those of the check are of a CPU
    backends.passes_probe = lambda name, kind: True  # pyright: ignore[reportAttributeAccessIssue]
    backends.BACKENDS.clear()
    backends.BACKENDS["flash-attn-2"] = _Library(lambda: FlashAttention2(functions), (None,))
    gather_keys.gather_keys_fwd = lambda key, value, index: gathered(len(index), key, value)
    gather_keys.gather_keys_bwd = lambda key, value, readers, first: gathered(len(first) - 1, key, value)
    return launches


class _Library(FlashLibrary):
    """A library that takes every dtype."""

    def unsupported_reason(self, query: Tensor, value: Tensor, options: AttentionOptions) -> str | None:
        return None
