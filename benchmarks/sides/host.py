"""A DPO step whose tensors are tiny: what remains is the time of the host.

On a CPU, the heads of both sides and fastdpo's attention take the path that they take on a GPU, with kernels and a
library of flash attention that launch nothing. Steps are checked before, on the path of a CPU.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from cProfile import Profile
from functools import partial
from pstats import Stats
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from triton.runtime.jit import KernelInterface
from trl.kernels import chunked_logprob
from trl.trainer import utils

from benchmarks.cases import Arrays, Unavailable
from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import Workload
from fastdpo.kernels import gather_keys, linear_logps, token_logps
from fastdpo.models.parts import base_of
from fastdpo.models.running import captures, graphs, recording
from fastdpo.models.state import ATTRIBUTE
from fastdpo.ops import devices
from fastdpo.ops.attention import routes
from fastdpo.ops.attention.device_layout import Kind
from fastdpo.ops.attention.flash import FlashAttention2, FlashLibrary
from fastdpo.ops.head import results

PROFILED = 10  # steps
PARTS = (  # of a path, and the name of a part; the first that fits
    ("/fastdpo/kernels/", "fastdpo: launchers of kernels"),
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
    """See `TrainerStep`. `seconds` of a step are those of the process on all its cores.

    Args:
        compiled: whether the trainer compiles the models, once nothing is launched. Models are checked as they are.
        layers_compiled: whether fastdpo compiles the layers.
        graphs: whether fastdpo replays CUDA graphs, once nothing is launched. A replay does nothing.
    """

    now = staticmethod(time.process_time)
    warms_up = True  # otherwise a tenth of a step is page faults, for memory that a training keeps
    LAUNCHES = False

    def __init__(
        self,
        workload: Workload,
        mode: str,
        compiled: bool = False,
        layers_compiled: bool = False,
        graphs: bool = False,
    ) -> None:
        if torch.accelerator.is_available():
            raise Unavailable("the time of the host is measured on machines without an accelerator")
        torch.set_num_threads(1)  # the compiler of a CPU runs the smallest loops in parallel; a GPU launches them
        super().__init__(workload, mode, layers_compiled=layers_compiled, graphs=graphs, compiled=compiled)
        self.records, self.graphs = graphs, False  # nothing is replayed before launches are replaced
        self.collate = self.trainer.get_train_dataloader().collate_fn
        self.examples = [self._examples(workload, i) for i in range(self.batches)]

    def _run(self, batch: int) -> Tensor:
        """Collating is a part of the step, as in a loader without workers."""
        inputs = send_to_device(self.collate(self.examples[batch]), self.trainer.accelerator.device)
        return self.trainer.training_step(self.model, inputs)

    def check(self) -> Arrays:
        stance = torch.compiler.set_stance("force_eager" if self.compiles else "default")
        with stance, mock.patch.dict(os.environ, FASTDPO_STRICT=str(int(self.fused and not self.records))):
            arrays = super().check()
            if self.counters:
                self.count_once()
            self._run(0)  # fastdpo examines a model again that has changed
            self.reset()
        self.launches = replace_launches()
        if self.records:
            replace_graphs(self.launches, [self.model] if self.reference is None else [self.model, self.reference])
        for _ in range(3):
            self._run(0)
            self.reset()
        return arrays

    def facts(self) -> dict[str, Any]:
        """The tokens of a step, the launches that were replaced outside of compiled code, and the profile."""
        self.prove()
        self.launches.clear()
        self._run(0)
        self.reset()
        return {"tokens": self.tokens_of_batches[0], "launches": Counter(self.launches), "profile": self._profile()}

    def _profile(self) -> dict[str, float]:
        """The share of each part, from Python's profiler. An operator is of the part that calls it."""
        profile = Profile(time.process_time)
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


class _Launches(list[str]):
    """The names of the kernels that would have been launched."""

    def kernel(self, name: str) -> Any:
        """Stands for a kernel of Triton."""
        return _Kernel(partial(self.add, name))

    def add(self, name: str) -> None:
        if not torch.compiler.is_compiling():
            self.append(name)


class _Kernel:
    def __init__(self, launched: Callable[[], None]) -> None:
        self.launched = launched

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launched()


def replace_launches() -> list[str]:
    """Takes the path of a GPU from now on (`take_path_of_gpu`), with launches that are listed instead.

    What kernels would write is left as it is. Attention of stock models is torch's, whose CPU kernels are short.
    """
    launches = _Launches()
    take_path_of_gpu(lambda: launches.append("attention"))
    routes.passes_probe = lambda name, kind: True  # pyright: ignore[reportAttributeAccessIssue]
    for module in (gather_keys, linear_logps, token_logps, chunked_logprob):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel") and isinstance(kernel, KernelInterface):
                setattr(module, name, launches.kernel(name))
    return launches


def replace_graphs(launches: list[str], models: list[nn.Module]) -> None:
    """Takes the CPU for a device with graphs from now on, whose replays are listed, and do nothing else."""

    def record(run: Callable[[], Any], memory: captures.Memory) -> tuple[Callable[[], None], Any]:
        return lambda: launches.append("graph"), run()

    graphs.DEVICE, recording.record = "cpu", record
    recording.Recording.distance_of = lambda *_: 0.0
    for model in models:
        vars(base_of(model, "host"))[ATTRIBUTE].runner.graphs.forget()  # which has found that the CPU has none


def take_path_of_gpu(attend: Callable[[], None]) -> None:
    """From now on, heads and fastdpo's attention take the path of a GPU on the CPU.

    Attention is that of a library whose functions call `attend` and compute nothing.
    """

    def forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes,
    ):  # fmt: skip
        attend()
        return torch.empty_like(q), torch.empty(q.shape[1], len(q))

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # fmt: skip
        attend()

    functions: Any = SimpleNamespace(**dict(zip(FlashAttention2.function_names, (forward, backward), strict=True)))
    routes.forget()  # the plans of the check, which are of a CPU
    routes.BACKENDS.clear()
    routes.BACKENDS["flash-attn-2"] = _Library(lambda: FlashAttention2(functions), (None,))
    devices.TRITON_DEVICES = ("cpu",)
    results.is_host = lambda device: False  # ids are checked where the host has them
    for module in (chunked_logprob, utils):
        module._use_triton = lambda device: True


class _Library(FlashLibrary):
    """A library that takes every dtype."""

    def unsupported_reason(self, kind: Kind) -> str | None:
        return None
