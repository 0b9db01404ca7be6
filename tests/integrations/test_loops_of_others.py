"""Trainers of other programs, with the few lines changed that their users would change: loss, metrics and
gradients are those of their own path over three steps.
"""

import random
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

import fastdpo
from tests.support import ROOT
from tests.support.comparison import assert_far_from_same, assert_same_training, double, sharpen
from tests.support.loops import Pair
from tests.support.ref_logps import ranks
from tests.support.trl.dpo import tiny_model
from tests.support.workers.packages import packages

LOOPS = ROOT / "tests" / "support" / "loops"


def source_of(name: str) -> str:
    return (LOOPS / f"{name}.py").read_text()


def changed(name: str) -> tuple[str, int]:
    """The source of a loop after its diff, and the number of lines that the diff adds."""
    source, diff = source_of(name), (LOOPS / f"{name}.diff").read_text()
    for hunk in diff.split("@@\n"):
        lines_of = hunk.splitlines(keepends=True)
        before, after = ("".join(x[1:] for x in lines_of if x[0] in kinds) for kinds in (" -", " +"))
        assert source.count(before) >= 1, before
        source = source.replace(before, after, 1)
    return source, sum(line.startswith("+") and bool(line[1:].strip()) for line in diff.splitlines())


def batches(seed: int = 0, n: int = 3) -> list[list[Pair]]:
    """Batches of three pairs with prompts and answers of different lengths."""
    rng = random.Random(seed)

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(3, 97) for _ in range(rng.randint(low, high))]

    return [[Pair(words(2, 9), words(2, 7), words(2, 7)) for _ in range(3)] for _ in range(n)]


def run(name: str, policy, reference, source: str | None = None, **options) -> SimpleNamespace:
    """Trains three steps by the source of a loop, or by its own."""
    module = types.ModuleType(name)
    exec(compile(source or source_of(name), name, "exec"), vars(module))
    done = SimpleNamespace(logs=[], gradients=[])

    def record(**logs: torch.Tensor) -> None:
        grads = {key: x.grad for key, x in policy.named_parameters() if x.grad is not None}
        done.gradients.append({k: x.full_tensor() if isinstance(x, DTensor) else x.clone() for k, x in grads.items()})
        done.logs.append({key: float(x) for key, x in logs.items()})

    module.train(policy, reference, batches(), record, **options)
    return done


def models() -> list:
    return [tiny_model(seed=seed) for seed in range(2)]


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_a_loop_with_a_model_of_transformers(loss):
    source, added = changed("mitchell")
    assert added <= 4
    before = fastdpo.calls.copy()
    found = run("mitchell", *models(), source, loss=loss)
    assert {path for _, _, path in fastdpo.calls - before} == {"fused"}
    stock = run("mitchell", *models(), loss=loss)
    assert_same_training(stock, found, lambda: run("mitchell", *map(double, models()), loss=loss))


def test_the_comparison_notices_a_missing_label():
    source, _ = changed("mitchell")
    source = source.replace("[[-100] * len(p) + a for p", "[[-100] * len(p) + [-100] + a[1:] for p")
    stock, found = run("mitchell", *models()), run("mitchell", *models(), source)
    assert_far_from_same(stock, found, lambda: run("mitchell", *map(double, models())))


def torchtune_decoder(seed: int):
    from torchtune.models.llama3 import llama3

    torch.manual_seed(seed)
    sizes = dict(num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=48, max_seq_len=24)
    made = llama3(vocab_size=97, **sizes)
    sharpen(made)
    return made


def run_torchtune(folder: str, source: str) -> SimpleNamespace:
    sys.path.insert(0, folder)
    return run("torchtune_recipe", torchtune_decoder(0), torchtune_decoder(1), source)


def test_the_recipe_of_torchtune(tmp_path):
    """In processes of their own: PEFT refuses the version of torchao that torchtune needs."""
    folder = str(packages("TORCHTUNE"))
    source, added = changed("torchtune_recipe")
    assert added <= 12
    sources = source_of("torchtune_recipe"), source
    (stock,), (found,) = (
        ranks(1, tmp_path / str(i), lambda _, x=x: run_torchtune(folder, x)) for i, x in enumerate(sources)
    )
    assert_same_training(stock, found)
