"""Pairwise combinations of DPOTrainer options: each pair of values occurs in at least one run.

Most interactions involve two options, such as truncation and precomputed values, weighting and
several losses, or checkpointing and adapters. `RUNS` covers all pairs with a handful of trainings.
A deterministic greedy search finds them.
"""

import random
from itertools import combinations, product

import pytest
from peft import LoraConfig, get_peft_model

from tests.support.trl.dpo import LORA, assert_fused, assert_same

AXES = {
    "loss": {
        "sigmoid": dict(loss_type=["sigmoid"]),
        "ipo": dict(loss_type=["ipo"]),  # divides by lengths
        "mixed": dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),  # reads per-token values
        "aot": dict(loss_type=["aot"]),  # mixes the pairs of a batch
    },
    "adapter": {
        "none": {},
        "new": dict(reference=False, peft_config=LoraConfig(**LORA)),  # the reference is the policy without adapters
        "trained": dict(reference=False, prepare=lambda model: get_peft_model(model, LoraConfig(**LORA))),  # copied
    },
    "checkpointing": {
        "off": {},
        "on": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
        "reentrant": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
    },
    "truncation": {
        "off": dict(max_length=None),
        "start": dict(max_length=16),  # cuts answers
        "end": dict(max_length=9, truncation_mode="keep_end"),  # cuts prompts, some entirely
    },
    "padding": {"off": {}, "multiple": dict(pad_to_multiple_of=16)},
    "accumulation": {"off": {}, "on": dict(gradient_accumulation_steps=2)},
    "precompute": {"off": {}, "on": dict(precompute_ref_log_probs=True)},
    "weighting": {"off": {}, "wpo": dict(use_weighting=True), "ld": dict(ld_alpha=0.5)},
    "sync": {"off": {}, "on": dict(sync_ref_model=True, ref_model_sync_steps=1)},
    "evaluation": {"off": {}, "on": dict(evaluate=6)},  # the last batch is partial
}

REJECTED_BY_TRL = {  # pairs of (option, value)
    frozenset({("sync", "on"), ("adapter", "new")}),  # there is no reference model
    frozenset({("sync", "on"), ("adapter", "trained")}),
    frozenset({("sync", "on"), ("precompute", "on")}),  # precomputed values would be outdated
    frozenset({("weighting", "wpo"), ("loss", "aot")}),  # weights belong to pairs, which aot separates by sorting
    frozenset({("weighting", "wpo"), ("loss", "mixed")}),  # its sft term is a scalar, which is weighted in place
}


def required_pairs() -> set[frozenset]:
    required = set()
    for (a, values_a), (b, values_b) in combinations(AXES.items(), 2):
        required |= {frozenset({(a, x), (b, y)}) for x, y in product(values_a, values_b)}
    return required - REJECTED_BY_TRL


def pairs_of(run: dict[str, str]) -> set[frozenset]:
    return {frozenset(pair) for pair in combinations(run.items(), 2)}


def covering_runs() -> list[dict[str, str]]:
    """Adds the best of 300 random runs until no pair is missing. The result is deterministic."""
    missing, runs, rng = required_pairs(), [], random.Random(8)  # a seed that gives few runs
    while missing:
        drawn = [{axis: rng.choice([*values]) for axis, values in AXES.items()} for _ in range(300)]
        fitting = [run for run in drawn if not pairs_of(run) & REJECTED_BY_TRL]
        runs.append(max(fitting, key=lambda run: len(pairs_of(run) & missing)))
        missing -= pairs_of(runs[-1])
    return runs


RUNS = covering_runs()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(run.values()))
def test_combination(both, run):
    options = {name: x for axis, value in run.items() for name, x in AXES[axis][value].items()}
    stock, patched = both(**options, max_steps=2)
    assert_same(stock, patched)
    policy = 4 if run["accumulation"] == "on" else 2
    evaluated = 2 if run["evaluation"] == "on" else 0
    reference = 1 + (evaluated > 0) if run["precompute"] == "on" else policy + evaluated  # one batch per pass
    assert_fused(patched, policy=policy, reference=reference, eval=evaluated)
