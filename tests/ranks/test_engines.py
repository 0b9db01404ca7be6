"""TRL's DPOTrainer on several ranks under DDP, FSDP2 and DeepSpeed's ZeRO: patched equals stock."""

from itertools import product

import pytest
import torch
from rank_comparison import assert_calls, assert_same, difference_of_weights

from tests.support.comparison import assert_same_gradients, differences_of_gradients, differences_of_logs, largest

ENGINES = ["ddp", "fsdp2", "zero2", "zero3"]
SHARDED = ("fsdp2", "zero3")

VARIANTS = [
    *product(["ddp"], ["lora", "no labels on the last rank"]),
    *product(["fsdp2", "zero3"], ["tied", "lora", "hybrid", "no labels on the last rank"]),
    *product(["fsdp2"], ["checkpointing", "reentrant checkpointing", "activation checkpointing"]),
]


def assert_trained(case: str, ranks: list[dict], number_of_ranks: int) -> None:
    """Asserts that all ranks equal stock, share the data, and end with equal weights."""
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert_same(stock, patched)
        assert stock["steps"] == 24 // (4 * number_of_ranks)
        assert not stock["calls"]
        for run in (stock, patched):
            # FSDP2 leaves the last norm and the head unsharded after a forward pass.
            assert run["sharded"] > 0.8 if case.startswith(SHARDED) else run["sharded"] == 0
        for name, weight in patched["weights"].items():
            assert torch.equal(weight, ranks[0]["patched"]["weights"][name]), f"{name} differs between the ranks"


def assert_trained_fused(case: str, ranks: list[dict], number_of_ranks: int) -> None:
    assert_trained(case, ranks, number_of_ranks)
    for rank in ranks:
        assert_calls(rank["patched"], batches=12 // number_of_ranks, evaluated=6 // number_of_ranks)


@pytest.mark.parametrize("case", ENGINES)
def test_training_equals_stock(case, ranks, number_of_ranks):
    assert_trained_fused(case, ranks, number_of_ranks)


@pytest.mark.parametrize(("engine", "what"), VARIANTS)
def test_a_variant_equals_stock(case, ranks, number_of_ranks):
    assert_trained_fused(case, ranks, number_of_ranks)


@pytest.mark.parametrize(("engine", "what"), product(ENGINES, ["compiled", "compiled, lora"]))
def test_compiled_layers(case, engine, ranks, number_of_ranks):
    assert_trained_fused(case, ranks, number_of_ranks)
    for rank in ranks:
        messages = [x for x in rank["patched"]["messages"] if "(policy)" in x and "compil" in x]
        first = "layers not compiled, " if engine in SHARDED else "compiling its layers; the first step waits for them"
        assert f"(policy): {first}" in messages[0]
        assert any("layers not compiled" in x for x in messages) == (engine in SHARDED), messages


@pytest.mark.parametrize(("engine", "what"), product(ENGINES, ["graphs", "graphs, lora"]))
def test_graphs(case, engine, ranks, number_of_ranks):
    """Ranks have batches of other numbers of tokens, and replay at other times."""
    assert_trained(case, ranks, number_of_ranks)
    for rank in ranks:
        calls, messages = rank["patched"]["calls"], rank["patched"]["messages"]
        reason = {"ddp": None, "zero2": "graphs-hooks"}.get(engine, "graphs-model")
        assert [x for x in messages if "CUDA" in x and f"[{reason}]" not in x] == []
        assert (calls.get(("policy", "replayed"), 0) > 0) == (reason is None), calls


@pytest.mark.parametrize(("engine", "what"), product(ENGINES, ["reward", "reward lora"]))
def test_a_reward_model(case, ranks, number_of_ranks):
    assert_trained(case, ranks, number_of_ranks)
    for rank in ranks:
        calls = {("policy", "fused"): 12 // number_of_ranks, ("eval", "fused"): 6 // number_of_ranks}
        assert rank["patched"]["calls"] == calls


@pytest.mark.parametrize("case", ["ddp without accumulation"])
def test_without_accumulation(case, ranks, number_of_ranks):
    assert_trained(case, ranks, number_of_ranks)
    for rank in ranks:
        assert_calls(rank["patched"], batches=6 // number_of_ranks, evaluated=6 // number_of_ranks)


PRECOMPUTED = [
    *product(["ddp"], ["precomputed", "precomputed in memory"]),
    *product(["zero2", "zero3"], ["precomputed", "precomputed lora"]),
]


@pytest.mark.parametrize(("engine", "what"), PRECOMPUTED)
def test_precomputed_reference(case, ranks, number_of_ranks):
    assert_trained(case, ranks, number_of_ranks)
    for rank in ranks:
        calls = rank["patched"]["calls"]
        assert set(calls) == {("policy", "fused"), ("reference", "fused")}
        assert calls["policy", "fused"] == 12 // number_of_ranks


@pytest.mark.parametrize("case", ["ddp holes", "fsdp2 holes", "zero3 holes"])
def test_a_batch_that_no_rank_can_pack(case, ranks, number_of_ranks):
    assert_trained(case, ranks, number_of_ranks)
    path = "stock" if case.startswith("ddp") else "padded"
    batches, evaluated = 12 // number_of_ranks, 6 // number_of_ranks
    for rank in ranks:
        assert_calls(rank["patched"], batches, evaluated, unpacked=1, path=path)


@pytest.mark.parametrize("case", ["ddp holes on the last rank"])
def test_a_batch_that_one_rank_cannot_pack(case, ranks, number_of_ranks):
    assert_trained(case, ranks, number_of_ranks)


@pytest.mark.parametrize("case", ENGINES)
def test_a_label_lost_on_one_rank_is_noticed(case, ranks):
    for rank in ranks:
        stock, sabotaged = rank["stock"], rank["sabotaged"]
        worst = [
            largest(differences_of_logs(stock["logs"], sabotaged["logs"])),
            difference_of_weights(stock, sabotaged),
        ]
        if not case.startswith("zero"):  # DeepSpeed does not expose gradients
            worst.append(largest(differences_of_gradients(stock["gradients"], sabotaged["gradients"])))
        assert all(each.size >= 10 for each in worst), worst


@pytest.mark.parametrize("cases", [("ddp multimodal", "fsdp2 multimodal")])
def test_the_gradient_of_a_head_that_is_an_fsdp2_unit(cases, ranks_of):
    """TRL does not average it over ranks (docs/distributed.md). When it does, this test fails."""
    ddp, fsdp2 = (ranks_of(case)[0] for case in cases)
    expected = ddp["stock"]["gradients"][0]
    assert_same_gradients([expected], [fsdp2["patched"]["gradients"][0]])
    wrong = {name for name, x in fsdp2["stock"]["gradients"][0].items() if (x - expected[name]).norm() > 0.1 * x.norm()}
    assert wrong == {"lm_head.weight"}
