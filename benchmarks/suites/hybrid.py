"""A training step of TRL's `DPOTrainer` on hybrid models, at the lengths of three datasets."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases import Case, Suite
from benchmarks.suites.step import DESCRIPTIONS, TRAINER, case_of, profiles, without_and_with, workload

ARCHITECTURES = ("Qwen3.5", "Falcon-H1", "LFM2")  # gated delta rule; Mamba 2 with attention; gated convolutions


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for architecture in ARCHITECTURES:
        for name, profile in profiles(quick).items():
            work = replace(workload(profile, quick), architecture=architecture)
            cases.append(case_of(f"{architecture}/{name}", architecture, profile, without_and_with(TRAINER, work)))
    return cases


SUITE = Suite(
    name="hybrid",
    title="DPO training step in TRL on hybrid models: policy forward and backward, reference forward",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS,
)
