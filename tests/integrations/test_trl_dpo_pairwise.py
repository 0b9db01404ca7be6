"""Options of TRL's DPOTrainer in combination: every two values of two options meet in at least one run.

What two options do to each other (truncation to precomputed values, weights to several losses, checkpointing to
adapters) shows in pairs of them. `RUNS` covers all pairs with a handful of trainings; a greedy search makes it, and the
same one each time.
"""

import random
from itertools import combinations, product

import pytest
from peft import LoraConfig, get_peft_model
from trl_runs import LORA, assert_fused, assert_same

AXES = {
    "loss": {
        "sigmoid": dict(loss_type=["sigmoid"]),
        "ipo": dict(loss_type=["ipo"]),  # divides by lengths
        "mixed": dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),  # reads per-token values
        "aot": dict(loss_type=["aot"]),  # mixes the pairs of a batch
    },
    "adapter": {
        "none": {},
        "new": dict(reference=False, peft_config=LoraConfig(**LORA)),  # the reference has adapters off
        "trained": dict(reference=False, prepare=lambda model: get_peft_model(model, LoraConfig(**LORA))),  # a copy
    },
    "checkpointing": {
        "off": {},
        "on": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
        "reentrant": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
    },
    "truncation": {
        "off": dict(max_length=None),
        "start": dict(max_length=16),  # cuts answers
        "end": dict(max_length=9, truncation_mode="keep_end"),  # cuts prompts, some of them whole
    },
    "padding": {"off": {}, "multiple": dict(pad_to_multiple_of=16)},
    "accumulation": {"off": {}, "on": dict(gradient_accumulation_steps=2)},
    "precompute": {"off": {}, "on": dict(precompute_ref_log_probs=True)},
    "weighting": {"off": {}, "wpo": dict(use_weighting=True), "ld": dict(ld_alpha=0.5)},
    "sync": {"off": {}, "on": dict(sync_ref_model=True, ref_model_sync_steps=1)},
    "evaluation": {"off": {}, "on": dict(evaluate=6)},  # its last batch is a partial one
}

REFUSED = {  # by TRL: (option, value), (option, value)
    frozenset({("sync", "on"), ("adapter", "new")}),  # there is no reference model
    frozenset({("sync", "on"), ("adapter", "trained")}),
    frozenset({("sync", "on"), ("precompute", "on")}),  # what is precomputed would be of an old one
    frozenset({("weighting", "wpo"), ("loss", "aot")}),  # weights are of pairs, and it sorts them apart
    frozenset({("weighting", "wpo"), ("loss", "mixed")}),  # its sft term is one number, and is weighted in place
}


def pairs_to_cover() -> set[frozenset]:
    found = set()
    for (a, values_a), (b, values_b) in combinations(AXES.items(), 2):
        found |= {frozenset({(a, x), (b, y)}) for x, y in product(values_a, values_b)}
    return found - REFUSED


def pairs_of(run: dict[str, str]) -> set[frozenset]:
    return {frozenset(pair) for pair in combinations(run.items(), 2)}


def completed(start: frozenset, axes: list[str], missing: set[frozenset]) -> dict[str, str]:
    """The run that has these two values, and of each other option, in turn, the value with the most missing pairs."""
    run = dict(start)
    for axis in axes:
        if axis not in run:
            fitting = [v for v in AXES[axis] if not pairs_of({**run, axis: v}) & REFUSED]
            run[axis] = max(fitting, key=lambda v: len(pairs_of({**run, axis: v}) & missing))
    return {axis: run[axis] for axis in AXES}


def covering_runs() -> list[dict[str, str]]:
    """The best of some tries, again and again, until no pair is missing. The same ones each time."""
    missing, runs, rng = pairs_to_cover(), [], random.Random(28)  # the fewest runs
    while missing:
        starts = sorted(missing, key=sorted)
        tries = [completed(rng.choice(starts), rng.sample(list(AXES), len(AXES)), missing) for _ in range(50)]
        runs.append(max(tries, key=lambda run: len(pairs_of(run) & missing)))
        missing -= pairs_of(runs[-1])
    return runs


RUNS = covering_runs()


def test_every_pair_is_covered_and_few_runs_do_it():
    covered = set().union(*map(pairs_of, RUNS))
    assert covered == pairs_to_cover()
    assert all(run.keys() == AXES.keys() for run in RUNS)
    assert len(RUNS) <= 16


@pytest.mark.parametrize("refused", REFUSED, ids=lambda pair: "-".join(f"{k}_{v}" for k, v in sorted(pair)))
def test_what_is_left_out_is_refused_by_trl(both, refused):
    options = {name: x for axis, value in refused for name, x in AXES[axis][value].items()}
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)):
        both(**options, max_steps=1)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(run.values()))
def test_combination(both, run):
    options = {name: x for axis, value in run.items() for name, x in AXES[axis][value].items()}
    stock, patched = both(**options, max_steps=2)
    assert_same(stock, patched)
    policy = 4 if run["accumulation"] == "on" else 2
    evaluated = 2 if run["evaluation"] == "on" else 0
    reference = 1 + (evaluated > 0) if run["precompute"] == "on" else policy + evaluated  # one batch of the pass each
    assert_fused(patched, policy=policy, reference=reference, eval=evaluated)
