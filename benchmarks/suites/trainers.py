"""Suites of a trainer's step, without and with fastdpo, at the lengths of three datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.cases import Case, Suite
from benchmarks.machine import on_gpu
from benchmarks.suites.step import (
    DESCRIPTIONS,
    LABELLED,
    LONGEST_STORED,
    STOCK,
    TRAINER,
    case_of,
    one_gpu_case,
    profiles,
    without_and_with,
    workload,
)

ARCHITECTURES = ("Qwen3.5", "Falcon-H1", "LFM2")  # gated delta rule; Mamba 2 with attention; gated convolutions
ROWS = 8  # of KTO, each with a prompt of its own, as in a shuffled dataset
EXACT = "benchmarks.sides.exact:ExactStep"
ALL: dict[str, dict[str, Any]] = {"all": {}}


def suite(
    name: str,
    title: str,
    truth: str,
    side: str,
    stock: tuple[str, str] = (LABELLED, DESCRIPTIONS[LABELLED]),
    groups: Mapping[str, dict[str, Any]] = ALL,
    has_gpu_case: bool = False,
    **options: Any,
) -> Suite:
    """A suite of two sides.

    Args:
        name, title, truth: of the suite.
        side: "module:callable" of both sides.
        stock: name and description of the one without fastdpo.
        groups: by name, options of its workload.
        has_gpu_case: whether a GPU runs one case.
        options: of all workloads.
    """
    mode = "labelled" if stock[0] == LABELLED else "stock"

    def build_cases(quick: bool) -> list[Case]:
        if has_gpu_case and on_gpu():
            return [one_gpu_case(side, quick)]
        cases = []
        for group, of_group in groups.items():
            for dataset, profile in profiles(quick).items():
                sides = without_and_with(side, workload(profile, quick, **options, **of_group), stock[0], mode)
                cases.append(case_of(dataset if groups is ALL else f"{group}/{dataset}", group, profile, sides))
        return cases

    return Suite(name, title, truth, build_cases, rounds=3, descriptions=DESCRIPTIONS | dict([stock]))


SUITES = (
    suite(
        "hybrid",
        "DPO training step in TRL on hybrid models: policy forward and backward, reference forward",
        EXACT,
        TRAINER,
        groups={architecture: {"architecture": architecture} for architecture in ARCHITECTURES},
    ),
    suite(
        "online",
        "Online DPO training step in TRL without generation: policy forward and backward, reference forward",
        EXACT,
        "benchmarks.sides.online:OnlineStep",
        (
            STOCK,
            "the trainer with its defaults, on given completions and without gradient checkpointing. It stores the "
            "logits of all positions of the completions and their log-softmax.",
        ),
        has_gpu_case=True,
        pairs=4,
        batches=2,
        longest=LONGEST_STORED,
    ),
    suite(
        "kto",
        "KTO training step in TRL: policy forward and backward, its KL pass, both passes of the reference",
        "benchmarks.sides.kto:ExactKTOStep",
        "benchmarks.sides.kto:KTOStep",
        pairs=ROWS,
    ),
    suite(
        "llamafactory",
        "DPO training step in LLaMA-Factory: policy forward and backward, reference forward",
        "benchmarks.sides.exact:ExactCompletions",
        "benchmarks.sides.llamafactory:LlamaFactoryStep",
        (
            "LLaMA-Factory as shipped",
            "its `CustomDPOTrainer` with its defaults, except that gradient checkpointing is off on both sides. Its "
            "loss takes the log-softmax of all logits of the padded rows.",
        ),
        groups={"full": {}, "LoRA": {"lora": True}},
    ),
)
