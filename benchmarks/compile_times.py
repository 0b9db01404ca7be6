"""Kernels that a first DPO step on a GPU compiles, and how long that takes, found out without a GPU.

    python -m benchmarks.compile_times [--target sm90] [--quick]

Steps of TRL's `DPOTrainer`, full fine-tuning with a reference model, take the path of a GPU on the CPU, and Triton
records each kernel instead of compiling and launching it. Then every recorded kernel is compiled once, without a
cache. Seconds are those of the processor, in Triton and in ptxas. Nothing is run on a GPU.

The model has the attention heads of Llama 3 8B, for whose sizes kernels are compiled. Its hidden size and vocabulary,
which kernels take as numbers, are smaller than Llama's, and divisible by 16 like these.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from rich.console import Console
from tabulate import tabulate
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from benchmarks.machine import processor
from benchmarks.sides.host import take_path_of_gpu
from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import ModelSize, Workload
from fastdpo.models.examine import probe
from fastdpo.models.state import ATTRIBUTE
from fastdpo.ops.attention import routes, triton_backend
from fastdpo.ops.choice import notes, tuning, verdicts
from fastdpo.ops.choice.tuning import Candidate
from fastdpo.ops.choice.verdicts import Trial
from fastdpo.ops.devices import in_new_thread
from fastdpo.ops.head import tile_format

LONG = (600, 300, 200)  # tokens of prompt, chosen and rejected: enough for attention to be tuned
SHORT = tuple((20, 9, 5 + i) for i in range(20))  # every remainder by 16
TARGETS = "sm80", "sm90", "sm100"
OPTIONS = "num_warps", "num_stages", "enable_fp_fusion"  # that kernels are launched with
LIBRARY, OWN, TUNING = "first batch, attention by a library", "attention by fastdpo's kernels", "tuning of the head"
BATCHES, LATER = "batches of other lengths", "evaluation, or tokens beyond `memory_budget`"
CHECK, STEP = "self-check", "step"


class LlamaHeads(ModelSize):
    """Any layers with the head size of Llama 3 8B."""

    @property
    def head_dim(self) -> int:
        return 128


SIZE = LlamaHeads(layers=1, hidden=64, mlp=16, heads=32, kv_heads=8, vocabulary=4096)


class Compilation(NamedTuple):
    """A kernel as it is compiled for some arguments.

    Attributes:
        needed_by: one of the constants above, like `stage`: what launches it first.
        kernel: of Triton.
        given: what Triton compiles it for.
    """

    needed_by: str
    stage: str
    kernel: Any
    given: dict[str, Any]


class Recorder:
    """A driver of Triton for a GPU that is not there. Launches are recorded and do nothing.

    Attributes:
        found: the compilations in the order in which they are needed.
    """

    def __init__(self, target: GPUTarget) -> None:
        self.target, self.needed_by, self.stage = target, "", STEP
        self.found: dict[tuple[str, str], Compilation] = {}

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> Recorder:
        return self

    def get_current_stream(self, device: object) -> int:
        return 0

    def record(self, *, key: str, fn: Any, compile: dict[str, Any], **rest: object) -> bool:
        """A hook of Triton, which neither compiles nor launches a kernel for which it returns True."""
        self.found.setdefault((fn.name, key), Compilation(self.needed_by, self.stage, fn.jit_function, compile))
        return True

    def run_trial(self, trial: Trial, device: torch.device, dtype: torch.dtype) -> None:
        """Stands for `verdicts.outcome`. Every trial passes."""
        self.stage = CHECK
        in_new_thread(lambda: list(trial(device, dtype)), device)
        self.stage = STEP

    def run_candidate(self, candidate: Candidate, device: torch.device) -> float:
        """Stands for `tuning.milliseconds`."""
        candidate.run()
        return 1.0


def install(target: str) -> Recorder:
    """Takes the path of a GPU on the CPU from now on, and records launches."""
    recorder = Recorder(GPUTarget("cuda", int(target.removeprefix("sm")), 32))
    driver._active, knobs.runtime.jit_cache_hook = recorder, recorder.record
    os.environ[notes.VARIABLE] = "0"
    take_path_of_gpu(lambda: None)
    routes.BACKENDS[routes.TRITON] = routes.OWN
    triton_backend.compute_capability = lambda device: int(target.removeprefix("sm")) // 10
    verdicts.TRIED_DEVICES = ("cpu",)
    verdicts.outcome = routes.outcome = recorder.run_trial
    tuning.milliseconds = recorder.run_candidate
    tile_format.LEAST_TUNED = 0
    return recorder


def record(target: str) -> Recorder:
    """Records what the first batch compiles, with each kind of attention and with tuning, and what later ones do."""
    work = Workload(((LONG,), *((pair,) for pair in SHORT)), weights="bfloat16", size=SIZE)
    step = TrainerStep(work, "fastdpo")
    step.step(0)  # examines the model, on the path of a CPU
    step.reset()
    recorder = install(target)

    def run(needed_by: str, batches: range) -> None:
        recorder.needed_by = needed_by
        for batch in batches:
            step.step(batch)
            step.reset()

    for needed_by in (LIBRARY, OWN, TUNING):
        os.environ[routes.VARIABLE] = routes.TRITON if needed_by == OWN else ""
        tuning.TUNED_DEVICES = ("cpu",) if needed_by == TUNING else ()
        recorder.needed_by = needed_by
        probe.probe(step.trainer.model, torch.device("cpu"))
        run(needed_by, range(1))
        run(BATCHES, range(1, step.batches))
    for model in (step.trainer.model, step.trainer.ref_model):
        fused = vars(model)[ATTRIBUTE]
        fused.options = fused.options._replace(memory_budget=0)
    run(LATER, range(1))
    step.trainer.prediction_step(step.model, dict(step.inputs[0]), prediction_loss_only=True)
    return recorder


def compile_cold(compilation: Compilation, target: GPUTarget) -> tuple[float, float]:
    """Seconds of the processor in Triton and in ptxas, without a cache."""
    given, before = compilation.given, os.times()
    source = ASTSource(compilation.kernel, given["signature"], given["constants"], given["configs"][0])
    with TemporaryDirectory() as cache:
        knobs.cache.dir = cache
        triton.compile(source, target=target, options={name: given[name] for name in OPTIONS})
    user, system, *of_children, _ = (x - y for x, y in zip(os.times(), before, strict=True))
    return user + system, sum(of_children)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_times", description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, default="sm90", help="the architecture; default: sm90")
    parser.add_argument("--quick", action="store_true", help="compile one kernel only, to check that everything runs")
    args = parser.parse_args(argv)
    if torch.accelerator.is_available():
        parser.error("the path of a GPU is taken on the CPU: hide accelerators, as by CUDA_VISIBLE_DEVICES=")
    recorder = record(args.target)
    knobs.runtime.jit_cache_hook = None
    groups: defaultdict[str, defaultdict[str, np.ndarray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(4)))
    for number, compilation in enumerate(recorder.found.values()):
        is_check = compilation.stage == CHECK
        times = (0.0, 0.0) if args.quick and number else compile_cold(compilation, recorder.target)
        groups[compilation.needed_by][compilation.kernel.__name__] += (is_check, not is_check, *times)
    rows = []
    for needed_by, kernels in groups.items():
        rows += [(f"**{needed_by}**", *sum(kernels.values())), *((f"`{name}`", *row) for name, row in kernels.items())]
    console = Console(highlight=False)
    console.print(f"{args.target}, Triton {triton.__version__}, {processor()}")
    more = sum(map(sum, groups[BATCHES].values()))
    console.print(f"{len(SHORT)} batches of other lengths, with either attention: {more:.0f} more kernels")
    headers = ("compiled for", CHECK, STEP, "s in Triton", "s in ptxas")
    formats_of_columns = ("", ".0f", ".0f", ".1f", ".1f")
    console.print(tabulate(rows, headers, tablefmt="github", floatfmt=formats_of_columns), soft_wrap=True)


if __name__ == "__main__":
    main()
