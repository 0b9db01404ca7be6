"""A step of LLaMA-Factory's DPO stage, at the lengths of three datasets. Runs where LLaMA-Factory is installed."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Suite
from benchmarks.suites.step import case_of, profiles, without_and_with, workload

LLAMAFACTORY = "LLaMA-Factory as shipped"


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for group, lora in (("full", False), ("LoRA", True)):
        for name, profile in profiles(quick).items():
            work = workload(profile, quick, lora)
            sides = without_and_with("benchmarks.sides.llamafactory:LlamaFactoryStep", work, LLAMAFACTORY, "stock")
            cases.append(case_of(f"{group}/{name}", group, profile, sides))
    return cases


SUITE = Suite(
    name="llamafactory",
    title="DPO training step in LLaMA-Factory: policy forward and backward, reference forward",
    truth="benchmarks.sides.exact:ExactCompletions",
    cases=build_cases,
    rounds=3,
    descriptions={
        LLAMAFACTORY: "its `CustomDPOTrainer` with its defaults, except that gradient checkpointing is off on both "
        "sides. Its loss takes the log-softmax of all logits of the padded rows.",
        SUBJECT: "the trainer after `fastdpo.patch()`.",
    },
)
