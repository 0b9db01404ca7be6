"""One rank of a launch. Usage: `python rank_worker.py DIRECTORY CASE...`.

Trains the named cases of `rank_cases.CASES` and saves the results in the directory.
"""

import copy
import dataclasses
import faulthandler
import functools
import gc
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate.utils.memory
import datasets
import deepspeed
import deepspeed.utils.nvtx
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from peft import TaskType
from rank_cases import CASES, OPTIONS, UNSEEN_BY_STOCK, Case, collator, stand_in
from rank_launch import SECONDS_A_CASE, SECONDS_A_COLLECTIVE, result
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import fastdpo
from tests.support.recorded_messages import recorded_messages
from tests.support.trl.dpo import Run, adapter, record, train
from tests.support.trl.groups import build_group
from tests.support.trl.kto import train_kto
from tests.support.trl.reward import train_reward
from tests.support.trl.sft import train_sft


def train_on_completions(directory: Path, model: PreTrainedModel, evaluate: int = 0, **options: Any) -> Run:
    """Runs a short training of GRPO."""
    return record(functools.partial(build_group, directory, model, **options))


TRAINERS: dict[str, tuple[Callable[..., Run], bool]] = {
    "DPO": (train, True),
    "GRPO": (train_on_completions, False),
    "KTO": (train_kto, True),
    "Reward": (train_reward, False),
    "SFT": (train_sft, False),
}
"""By the names of trainers, the function that trains with one, and whether it has a reference."""

ENVIRONMENT = dict(os.environ)
RANK = int(ENVIRONMENT["RANK"])


def main(directory: Path, names: list[str]) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{ENVIRONMENT['RENDEZVOUS']}",
        rank=RANK,
        world_size=int(ENVIRONMENT["WORLD_SIZE"]),
        timeout=timedelta(seconds=SECONDS_A_COLLECTIVE),
    )
    torch.set_num_threads(1)
    tempfile.tempdir = str(directory)
    datasets.config.HF_DATASETS_CACHE = directory / "datasets"
    datasets.disable_progress_bars()
    AcceleratorState.__init__ = with_fsdp_on_a_cpu(AcceleratorState.__init__)
    Accelerator.multi_device = with_tensor_parallelism_on_a_cpu(Accelerator.multi_device)
    # Use the collectives of gloo, which need no compilation.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # What is done for a profiler, for a device or again in each step takes time in each training, and has no effect.
    deepspeed.utils.nvtx.enable_nvtx = False
    accelerate.utils.memory.clear_device_cache = lambda *args, **kwargs: None
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    for name in names:
        print(f"case {name!r}", flush=True)
        faulthandler.dump_traceback_later(SECONDS_A_CASE, exit=True)
        done = {kind: result_of(directory / name / kind, CASES[name], kind) for kind in CASES[name].kinds}
        torch.save(done, result(directory, name, RANK))
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    os._exit(0)  # gloo may abort while it shuts down


def with_fsdp_on_a_cpu(init):
    """Wraps `AcceleratorState.__init__` to enable FSDP on a CPU, where accelerate ignores it."""

    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None:
            self.fsdp_plugin = kwargs["fsdp_plugin"]
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                self.fsdp_plugin.set_mixed_precision(self.mixed_precision)

    return __init__


def with_tensor_parallelism_on_a_cpu(multi_device: property) -> property:
    """Wraps `Accelerator.multi_device` to allow tensor parallelism on a CPU.

    accelerate rejects it there.
    """

    def has_several(self) -> bool:
        parallelism = self.parallelism_config
        return multi_device.fget(self) or (parallelism is not None and parallelism.tp_enabled)

    return property(has_several)


def forget_engines() -> None:
    """Resets global state and environment variables that would set the next training's engine, or how it runs."""
    stand_in.undo()
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()


stock_runs: list[tuple[Case, dict[str, Any]]] = []


def result_of(directory: Path, case: Case, kind: str) -> dict[str, Any]:
    """What `run` returns. Cases that differ in what stock does not see share its training."""
    if kind != "stock":
        return run(directory, case, kind)
    prepare = None if case.prepare in UNSEEN_BY_STOCK else case.prepare
    seen = dataclasses.replace(case, kinds=(), patch={}, prepare=prepare)
    found = next((done for other, done in stock_runs if other == seen), None)
    if found is None:
        found = run(directory, case, kind)
        stock_runs.append((seen, found))
    return found


def run(directory: Path, case: Case, kind: str) -> dict[str, Any]:
    """Runs one training.

    Returns logs, gradients of each step, final weights, counters, and the messages of fastdpo's logger.
    """
    forget_engines()
    model = build(directory, case, seed=0)
    train_with, has_reference = TRAINERS[case.trainer]
    reference = build(directory, case, seed=1) if has_reference and not case.lora else None
    if case.prepare is not None and case.changed_on(RANK, dist.get_world_size()):
        for each in filter(None, (model, reference)):
            case.prepare(each)
    options = copy.deepcopy(OPTIONS | case.options)  # engines write into their configurations
    torch.manual_seed(0)  # adapters
    messages = recorded_messages()
    task_type = TaskType.SEQ_CLS if case.trainer == "Reward" else None
    peft_config = adapter(task_type=task_type)["peft_config"] if case.lora else None
    options |= dict(peft_config=peft_config, data=case.data(directory, kind))
    if has_reference:
        options["reference"] = reference
    if case.trainer == "DPO":
        options |= dict(trainer_class=case.trainer_class, data_collator=collator(case, kind))
    with nullcontext() if kind == "stock" else fastdpo.patched(f"trl.{case.trainer}Trainer", **case.patch):
        done = train_with(directory / f"rank{RANK}", model, **options)
    done.gradients = [{name: whole(x) for name, x in step.items()} for step in done.gradients]
    named = dict(model.named_parameters())
    sharded = sum(is_sharded(x) for x in named.values()) / len(named)
    with deepspeed.zero.GatheredParameters(list(named.values())):
        # Under load DeepSpeed's gather has returned too early. gloo runs the barrier after it.
        dist.barrier()
        weights = {name: whole(x) for name, x in named.items()}
    return {**vars(done), "weights": weights, "sharded": sharded, "messages": messages}


def build(directory: Path, case: Case, seed: int) -> PreTrainedModel:
    model = case.make_model(seed=seed, **case.model)
    if not case.tensor_parallel:
        return model
    if RANK == 0:
        model.save_pretrained(directory / f"model{seed}")
    dist.barrier()
    units = 2 if case.in_two_halves else 1
    shared = DistributedConfig(tp_size=dist.get_world_size() // units, fsdp_size=units, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(directory / f"model{seed}", distributed_config=shared)


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x.clone()).detach()


def is_sharded(x: torch.Tensor) -> bool:
    """Whether this rank has only a shard of a parameter, under FSDP2 or ZeRO-3."""
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.numel() < getattr(x, "ds_numel", x.numel())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
