"""A step that accumulates small batches, as in the header of TRL's scripts, with and without `max_tokens="auto"`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.machine import on_gpu
from benchmarks.sides.workload import AccumulatedWorkload, GroupWorkload, ModelSize, Workload, draw_lengths
from benchmarks.suites.step import (
    BOUNDS,
    DESCRIPTIONS,
    GPU_SIZE,
    GRAPHS_OF_COMPILED,
    LABELLED,
    LONGEST_STORED,
    PROFILES,
    QUICK_SIZE,
    SPREAD,
    STOCK,
    LengthProfile,
    case_of,
    case_of_batches,
    profiles,
)

AS_ACCUMULATED = "fastdpo without max_tokens"
SIZE = ModelSize(layers=6, hidden=64, mlp=192, vocabulary=4000)  # small, as is a model on a GPU to its host
ROWS = 16
ACCUMULATIONS = {"2 x 8": 8, "1 x 16": 16}
TRAINERS = {"DPO": "HH", "Reward": "HH", "KTO": "TL;DR", "GRPO": "HH"}
COMPLETIONS_OF_PROMPT = {"KTO": 4}
SIDES = "benchmarks.sides.accumulated:Accumulated"


def build_cases(quick: bool) -> list[Case]:
    """16 pairs, rows or completions a step. `KTOTrainer` has no batches of one row."""
    if on_gpu():
        return build_gpu_cases(quick)
    size = QUICK_SIZE if quick else SIZE
    return [
        _case(f"{trainer}/{name}", trainer, dataset, quick, accumulation=accumulation, size=size)
        for trainer, dataset in TRAINERS.items()
        for name, accumulation in ACCUMULATIONS.items()
        if (trainer, accumulation) != ("KTO", ROWS)
    ]


def build_gpu_cases(quick: bool) -> list[Case]:
    """2 pairs 8 times, as in the header of TRL's scripts, at the lengths of six datasets."""
    options = {"accumulation": ACCUMULATIONS["2 x 8"], "bf16": True, "weights": "bfloat16"}
    options["size"] = QUICK_SIZE if quick else GPU_SIZE
    of_batches = profiles(quick, PROFILES)
    sides = _of_rows([*of_batches.values()], "DPO", (STOCK, "stock"), options)
    auto, replayed = sides[-1], {"layers_compiled": True, "graphs": True}
    sides = *sides, replace(auto, name=GRAPHS_OF_COMPILED, options={**auto.options, **replayed})
    return [case_of_batches("0.5B, DPO", "DPO", of_batches, sides)]


def _case(name: str, trainer: str, dataset: str, quick: bool, **options: Any) -> Case:
    (profile,) = profiles(quick, [dataset]).values()
    options["trainer"] = trainer
    of_trl = (STOCK, "stock") if trainer == "Reward" else (LABELLED, "labelled")
    sides = _of_groups(profile, options) if trainer == "GRPO" else _of_rows([profile], trainer, of_trl, options)
    return case_of(name, trainer, profile, sides)


def _of_rows(of_batches: list[LengthProfile], trainer: str, of_trl: tuple[str, str], options: dict) -> tuple[Side, ...]:
    batches = tuple(draw_lengths(*x, ROWS, 0, spread=SPREAD, bounds=BOUNDS) for x in of_batches)
    work = AccumulatedWorkload(batches, pairs_of_prompt=COMPLETIONS_OF_PROMPT.get(trainer, 1), **options)
    return _sides(f"{SIDES}{trainer}", work, of_trl)


def _of_groups(profile: tuple[float, float], options: dict) -> tuple[Side, ...]:
    lengths = draw_lengths(*profile, 2, 0, spread=SPREAD, bounds=(2, LONGEST_STORED), completions=ROWS // 2)
    work = GroupWorkload((lengths,), **options)
    return _sides(f"{SIDES}GRPO", work, (LABELLED, "labelled"))


def _sides(build: str, work: Workload, of_trl: tuple[str, str]) -> tuple[Side, ...]:
    name, mode = of_trl
    return (
        Side(name, build, work, {"mode": mode}),
        Side(AS_ACCUMULATED, build, work, {"mode": "fastdpo"}),
        Side(SUBJECT, build, work, {"mode": "fastdpo", "max_tokens": "auto"}),
    )


SUITE = Suite(
    name="accumulated",
    title="Training step in TRL that accumulates 16 pairs (KTO: rows, 4 a prompt; GRPO: completions, 8 a prompt) in "
    "batches of 2 or 1",
    truth="benchmarks.sides.accumulated:ExactAccumulated",
    cases=build_cases,
    rounds=3,
    descriptions={
        STOCK: DESCRIPTIONS[STOCK],
        LABELLED: DESCRIPTIONS[LABELLED],
        AS_ACCUMULATED: "fastdpo in the batches of the trainer.",
        SUBJECT: 'fastdpo with `max_tokens="auto"`, when it has chosen. The steps have no optimizer. On a CPU, their '
        "seconds are those of the processor, added up over its threads.",
        GRAPHS_OF_COMPILED: "the same with CUDA graphs of compiled layers, once all batches are replayed.",
    },
)
