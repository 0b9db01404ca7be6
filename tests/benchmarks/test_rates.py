"""Tokens a second and model FLOPs, computed from the workloads of results."""

import dataclasses
import json

import pytest

from benchmarks import rates, report, trainings
from benchmarks.sides import groups, kto, reward, vision
from benchmarks.sides.workload import AccumulatedWorkload, GroupWorkload, ModelSize, VisionWorkload, Workload

SIZE = ModelSize(layers=2, hidden=8, mlp=16, heads=2, kv_heads=1, vocabulary=32)
PAIRS = ((3, 2, 5), (4, 1, 2), (6, 3, 3), (2, 4, 1))
PROMPT, NAMES = "prompt_ids", ("chosen_ids", "rejected_ids", "reference_ids", "completion_ids", "KL_completion_ids")


def json_of(workload) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(workload)))


def test_a_row_of_the_gpu_table_by_hand():
    """Qwen2.5-0.5B at the lengths of HH, with TRL as shipped: each factor is written out."""
    result = report.results(report.GPU_RESULTS)["step"]
    (case,) = (case for case in result["cases"] if case["name"] == "0.5B, full/HH")
    rows = [(p, c) for p, *completions in case["workload"]["batches"][1] for c in completions]
    assert len(rows) == 16
    tokens, completions, squares = 3798, sum(c for _, c in rows), sum((p + c) ** 2 for p, c in rows)
    assert sum(map(sum, rows)) == tokens
    of_layer = 896 * 896 + 2 * 896 * 128 + 896 * 896 + 3 * 896 * 4864  # q, k and v, o, MLP
    forward = 2 * 24 * of_layer * tokens + 2 * 896 * 151_936 * completions + 4 * 24 * 14 * 64 * squares
    flops = 3 * forward + forward  # policy with its backward, and the reference
    summary = result["summary"]["cases"][case["name"]]
    seconds = summary["seconds"]["TRL as shipped"]["value"]
    assert summary["work"]["model_flops"] == flops
    assert summary["tokens_per_second"]["TRL as shipped"] == pytest.approx(3798 / seconds)
    assert summary["utilization"]["TRL as shipped"] == pytest.approx(flops / seconds / 989e12)
    line = next(x for x in report.GPU_PAGE.read_text().splitlines() if x.startswith("| 0.5B, full/HH") and "GiB" in x)
    cell = f"{3798 / seconds:,.0f}, {flops / seconds / 989e12:.0%}, {11270072832 / 2**30:.2f} GiB"
    assert [x.strip() for x in line.split("|")][2] == cell == "29,771, 10%, 10.50 GiB"


def test_adapters_are_trained_and_frozen_weights_are_not():
    rows, full = [(3, 2), (3, 5)], json_of(Workload((PAIRS,), size=SIZE))
    tokens, squares = 13, 5**2 + 8**2
    layers, head = 2 * (8 * 8 * 2 + 2 * 8 * 4 + 3 * 8 * 16), 8 * 32
    adapters = 2 * 16 * (16 + 12 + 12 + 16 + 3 * 24)
    weights, attention = 2 * (layers * tokens + head * 7), 4 * 2 * 8 * squares
    assert rates.model_flops(full, rows, []) == 3 * (weights + attention)
    assert rates.model_flops(full, [], rows) == weights + attention
    assert rates.model_flops(full, rows, [], has_vocabulary=False) == 3 * (2 * layers * tokens + attention)
    lora = rates.model_flops(full | {"lora": True}, rows, rows)
    assert lora == 2 * weights + 3 * (attention + 2 * adapters * tokens) + weights + attention


def rows_of(examples: list[dict]) -> list[tuple[int, int]]:
    return sorted((len(x[PROMPT]), len(x[name])) for x in examples for name in NAMES if name in x)


@pytest.mark.parametrize(
    ("suite", "workload", "examples"),
    [
        ("step", Workload((PAIRS,)), lambda work: work.examples(0)),
        ("kto", Workload((PAIRS,)), lambda work: kto.examples(work, 0)),
        ("accumulated", AccumulatedWorkload((PAIRS,), trainer="KTO", pairs_of_prompt=2), lambda x: kto.examples(x, 0)),
        ("vision", VisionWorkload((PAIRS,), images=2, side=64), lambda work: vision.examples(work, 0)),
    ],
    ids=["step", "kto", "kto accumulated", "vision"],
)
def test_rows_are_those_of_the_measured_sides(suite, workload, examples):
    name = getattr(workload, "trainer", suite).lower()
    batch, trained, scored = rates.passes(name, json_of(workload), 0)
    of_kl = (len(scored) - len(batch)) // 2
    assert sorted(batch + scored[len(batch) : len(batch) + of_kl]) == rows_of(examples(workload))
    assert trained == batch


def test_rows_of_other_trainers():
    work = Workload((PAIRS,))
    of_reward = sorted(len(row) for x in reward.examples(work, 0) for row in x.values())
    assert sorted(map(sum, rates.passes("reward", json_of(work), 0)[0])) == of_reward
    of_groups = GroupWorkload(((((3, *range(1, 9))), (5, *range(2, 10))),))
    expected = [(len(p), len(c)) for p, c in groups.rows(of_groups, 0)]
    assert rates.passes("grpo", json_of(of_groups), 0) == (expected, expected, expected)
    assert [len(x) for x in rates.passes("rloo", json_of(of_groups), 0)] == [16, 16, 32]


def test_rows_are_truncated():
    work = json_of(Workload(((((6, 5, 1)), (9, 2, 2)),), max_length=8))
    assert rates.passes("step", work, 0)[0] == [(6, 2), (6, 1), (8, 0), (8, 0)]


def test_tokens_of_a_training_are_those_that_the_trainer_has_counted():
    result = json.loads(report.TRAININGS.read_text())
    of_steps = rates.of_trainings(result)
    assert result["summary"] == of_steps
    drawn = json_of(trainings.workload(result["steps"], result["quick"]))
    assert result["workload"]["batches"] == drawn["batches"]
    for side in result["sides"].values():
        counted = max(log.get("num_tokens", 0) for log in side["logs"])
        assert of_steps["work"]["tokens"] * result["steps"] == counted == 183_789


def test_weights_are_those_that_a_gpu_holds():
    """Next to the pairs of all batches."""
    result = report.results(report.GPU_RESULTS)["step"]
    for case in result["cases"]:
        held = case["sides"]["fastdpo"]["facts"]["baseline_bytes"]
        assert result["summary"]["cases"][case["name"]]["work"]["weights_bytes"] == pytest.approx(held, rel=0.01)


def test_every_step_has_rates_and_a_head_has_none():
    for name, result in report.results().items():
        for case in result["cases"]:
            summary = result["summary"]["cases"][case["name"]]
            assert ("work" in summary) == (name not in ("head", "loss", "attention") and "head/" not in case["name"])
            assert summary.get("tokens_per_second", {}).keys() in ({*summary["seconds"]}, set())
            assert not summary.get("utilization")  # the peak of these cores is not known
