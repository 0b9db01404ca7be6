"""The kernels that DPO steps on a GPU compile, found out without a GPU.

Steps of TRL's `DPOTrainer` take the path of a GPU on the CPU, and Triton records each kernel instead of compiling and
launching it.

The model has the attention heads of Llama 3 8B, for whose sizes kernels are compiled. Its hidden size and vocabulary,
which kernels take as numbers, are smaller than Llama's, and divisible by 16 like these.
"""

import os

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.sides.host import take_path_of_gpu
from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import ModelSize, Workload
from fastdpo.models.examine import probe
from fastdpo.ops.attention import routes, triton_backend
from fastdpo.ops.choice import notes, tuning, verdicts
from fastdpo.ops.devices import in_new_thread
from fastdpo.ops.head import linear_logps, row_warps

LONG = (600, 300, 200)  # tokens of prompt, chosen and rejected: enough for attention to be tuned
SHORT = tuple((20, 9, 5 + i) for i in range(20))  # every remainder by 16
LIBRARY, OWN, TUNING = "first batch, attention by a library", "attention by fastdpo's kernels", "tuning of the head"
BATCHES, LATER = "batches of other lengths", "evaluation, or tokens beyond `memory_budget`"
CHECK, STEP = "self-check", "step"


class LlamaHeads(ModelSize):
    """Any layers with the head size of Llama 3 8B."""

    @property
    def head_dim(self) -> int:
        return 128


SIZE = LlamaHeads(layers=1, hidden=64, mlp=16, heads=32, kv_heads=8, vocabulary=4096)


class Recorder:
    """A driver of Triton for a GPU with `capability` that is not there. Launches are recorded and do nothing.

    Attributes:
        found: what first needs a kernel, and in which stage, by the name of the kernel and what it is compiled for.
    """

    def __init__(self, capability: int):
        self.target, self.needed_by, self.stage = GPUTarget("cuda", capability, 32), "", STEP
        self.found: dict[tuple[str, str], tuple[str, str]] = {}

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self

    def get_current_stream(self, device):
        return 0

    def record(self, *, key, fn, **rest):
        """A hook of Triton, which neither compiles nor launches a kernel for which it returns True."""
        self.found.setdefault((fn.name.rpartition(".")[2], key), (self.needed_by, self.stage))
        return True

    def run_trial(self, trial, device, dtype):
        """Stands for `verdicts.outcome`. Every trial passes."""
        self.stage = CHECK
        in_new_thread(lambda: list(trial(device, dtype)), device)
        self.stage = STEP

    def run_candidate(self, candidate, device):
        """Stands for `tuning.milliseconds`."""
        candidate.run()
        return 1.0


def install(capability: int) -> Recorder:
    """Takes the path of a GPU on the CPU from now on, and records launches."""
    recorder = Recorder(capability)
    driver._active, knobs.runtime.jit_cache_hook = recorder, recorder.record
    os.environ[notes.VARIABLE] = "0"
    take_path_of_gpu(lambda: None)
    routes.BACKENDS[routes.TRITON] = routes.OWN
    triton_backend.compute_capability = lambda device: capability // 10
    verdicts.TRIED_DEVICES = ("cpu",)
    verdicts.outcome = routes.outcome = recorder.run_trial
    tuning.milliseconds = recorder.run_candidate
    row_warps.LEAST_TUNED = 0
    return recorder


def record(capability: int, lora: bool = False) -> Recorder:
    """Records what the first batch compiles, with each kind of attention and with tuning, and what later ones do."""
    work = Workload(((LONG,), *((pair,) for pair in SHORT)), lora=lora, weights="bfloat16", size=SIZE)
    step = TrainerStep(work, "fastdpo")
    step.step(0)  # examines the model, on the path of a CPU
    step.reset()
    recorder = install(capability)

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
    linear_logps.budget_for = lambda trained, device_memory: 0
    run(LATER, range(1))
    step.trainer.prediction_step(step.model, dict(step.inputs[0]), prediction_loss_only=True)
    return recorder
