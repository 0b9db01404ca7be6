"""Whole trainings with TRL's `DPOTrainer`, as shipped and patched, by the clock of `trainer.train()`.

    python -m benchmarks.trainings [--json out/trainings.json] [--steps N] [--sides REGEX] [--quick]

The settings are those in the header of TRL's script for DPO: 2 pairs 8 times a step, a learning rate of 5e-7, float32
weights under autocast to bfloat16, gradient checkpointing, AdamW, and an evaluation. Each side trains in a process of
its own, one after the other, with empty caches of fastdpo and of Triton, or with those that fastdpo has left. Seconds
contain what the first steps wait for, which is split into its parts, none of which contains those within it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import DPOConfig

from benchmarks import machine, messages
from benchmarks.cases import SUBJECT
from benchmarks.parts import CACHES, Clock, watched
from benchmarks.rates import of_trainings
from benchmarks.run import PACKAGES
from benchmarks.sides import workload as w
from benchmarks.suites.step import BOUNDS, GPU_SIZE, PROFILES, QUICK_PROFILES, QUICK_SIZE, SPREAD, STOCK
from benchmarks.tables import trainings_table
from fastdpo.commands.check.meters import now

WARM = "fastdpo, warm caches"
SIDES: dict[str, dict[str, Any] | None] = {
    STOCK: None,
    SUBJECT: {},
    WARM: {},
    'fastdpo, max_tokens="auto"': {"max_tokens": "auto"},
}
"""The options of `fastdpo.patch`."""
PAIRS, ACCUMULATION = 2, 8
EVALUATED = 32  # pairs


class StepClock(TrainerCallback):
    """When the training began, when each optimizer step ended, and what was logged. `parts` is on in the first step."""

    def __init__(self, parts: Clock) -> None:
        self.parts = parts
        self.ends: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(now())
        self.parts.is_on = True

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.parts.is_on = False
        self.ends.append(now())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.logs.append(logs)


def workload(steps: int, quick: bool) -> w.Workload:
    """Two batches: the pairs of the evaluation, and those of all steps."""
    profile = QUICK_PROFILES["HH"] if quick else PROFILES["UltraFeedback"]
    lengths = w.draw_lengths(*profile, steps * PAIRS * ACCUMULATION + EVALUATED, 0, spread=SPREAD, bounds=BOUNDS)
    options = dict(size=QUICK_SIZE if quick else GPU_SIZE, bf16=torch.accelerator.is_available(), checkpointing=True)
    return w.Workload((lengths[:EVALUATED], lengths[EVALUATED:]), max_length=1024, **options)  # that of `DPOConfig`


def train(options: dict[str, Any] | None, steps: int, quick: bool, threads: int) -> dict[str, Any]:
    """Runs in a process of its own."""
    import fastdpo
    from benchmarks.sides.trainer import TokenizedTrainer, build_tokenizer

    before = {"process and imports": time.time() - psutil.Process().create_time()}
    torch.set_num_threads(threads)
    logged = messages.collected()
    parts = watched()
    if options is not None:
        os.environ["FASTDPO_STRICT"] = "1"  # a call that is not fused raises
        fastdpo.patch("trl.DPOTrainer", **options)
    work = workload(steps, quick)
    on_device = torch.accelerator.is_available()
    with TemporaryDirectory() as directory:
        config = DPOConfig(
            output_dir=directory,
            max_steps=steps,
            per_device_train_batch_size=PAIRS,
            gradient_accumulation_steps=ACCUMULATION,
            learning_rate=5e-7,
            eval_strategy="steps",
            eval_steps=steps,
            logging_steps=max(steps // 5, 1),
            bf16=work.bf16,
            max_length=work.max_length,
            use_cpu=not on_device,
            dataloader_pin_memory=on_device,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        start = now()
        models = [w.build_model(work, seed) for seed in (w.POLICY, w.REFERENCE)]
        built = now()
        trainer = TokenizedTrainer(
            *models,
            args=config,
            train_dataset=Dataset.from_list(work.examples(1)),
            eval_dataset=Dataset.from_list(work.examples(0)),
            processing_class=build_tokenizer(),
        )
        before |= {"models": built - start, "trainer": now() - built}
        for part, owner, name in (
            ("batches", trainer, "get_batch_samples"),
            ("backward", torch.Tensor, "backward"),
            ("optimizer", torch.optim.AdamW, "step"),
        ):
            parts.watch(part, owner, name)
        parts.is_on, clock = False, StepClock(parts)
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        start = now()
        trainer.train()
        seconds = now() - start
    if bool(fastdpo.calls) != (options is not None):
        raise RuntimeError(f"calls must be {'stock' if options is None else 'fused'}; got {dict(fastdpo.calls)}")
    of_steps = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    before["train() up to its first step"] = clock.ends[0] - start
    rest = {"forward and everything else": of_steps[0] - parts.seconds.total()}
    first = {"before_first_step": before, "first_step": dict(parts.seconds) | rest}
    return first | {
        "seconds": seconds,
        "step_seconds": of_steps,
        "peak_bytes": peak,
        "logs": clock.logs,
        "calls": {" ".join(call): n for call, n in fastdpo.calls.items()},
        "messages": logged,
    }


def in_new_process(run: Callable[[], dict[str, Any]], variables: dict[str, str]) -> dict[str, Any]:
    kept = dict(os.environ)
    os.environ.update(variables)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(run)
    finally:
        os.environ.clear()
        os.environ.update(kept)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainings", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("out/trainings.json"), help="written after each side")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--sides", default="", metavar="REGEX", help="run only sides whose name matches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    args = parser.parse_args(argv)
    result: dict[str, Any] = {
        **machine.origin(*PACKAGES),
        "quick": args.quick,
        "steps": args.steps,
        "workload": asdict(workload(args.steps, args.quick)),
        "sides": {},
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as directory:
        for side, options in SIDES.items():
            if re.search(args.sides, side):
                run = partial(train, options, args.steps, args.quick, args.threads)
                caches = f"{directory}/{SUBJECT if side == WARM else side}"
                result["sides"][side] = in_new_process(run, {name: f"{caches}/{name}" for name in CACHES})
                result["summary"] = of_trainings(result)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
                print(trainings_table(result), flush=True)


if __name__ == "__main__":
    main()
