"""The recipe of torchtune, with the few lines changed that its users would change: loss, metrics and gradients are
those of its own path over three steps. tests/integrations/test_custom_loops.py has loops with models of transformers.
"""

import random
import sys
from types import ModuleType, SimpleNamespace

import torch

from tests.support import ROOT
from tests.support.comparison import assert_same_training, sharpen
from tests.support.loops import Pair
from tests.support.ref_logps import ranks
from tests.support.workers.packages import packages

RECIPE = ROOT / "tests" / "support" / "loops" / "torchtune_recipe.py"


def changed(source: str) -> tuple[str, int]:
    """The source after its diff, and the number of lines that the diff adds."""
    diff = RECIPE.with_suffix(".diff").read_text()
    for hunk in diff.split("@@\n"):
        lines_of = hunk.splitlines(keepends=True)
        before, after = ("".join(x[1:] for x in lines_of if x[0] in kinds) for kinds in (" -", " +"))
        assert source.count(before) >= 1, before
        source = source.replace(before, after, 1)
    return source, sum(line.startswith("+") and bool(line[1:].strip()) for line in diff.splitlines())


def batches() -> list[list[Pair]]:
    """Three batches of three pairs with prompts and answers of different lengths."""
    rng = random.Random(0)

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(3, 97) for _ in range(rng.randint(low, high))]

    return [[Pair(words(2, 9), words(2, 7), words(2, 7)) for _ in range(3)] for _ in range(3)]


def decoder(seed: int):
    from torchtune.models.llama3 import llama3

    torch.manual_seed(seed)
    sizes = dict(num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=48, max_seq_len=24)
    made = llama3(vocab_size=97, **sizes)
    sharpen(made)
    return made


def run(folder: str, source: str) -> SimpleNamespace:
    """Trains three steps by a source of the recipe."""
    sys.path.insert(0, folder)
    module, policy, done = ModuleType("recipe"), decoder(0), SimpleNamespace(logs=[], gradients=[])
    exec(compile(source, "recipe", "exec"), vars(module))

    def record(**logs: torch.Tensor) -> None:
        done.gradients.append({key: x.grad.clone() for key, x in policy.named_parameters() if x.grad is not None})
        done.logs.append({key: float(x) for key, x in logs.items()})

    module.train(policy, decoder(1), batches(), record)
    return done


def test_the_recipe_of_torchtune(tmp_path):
    """In processes of their own: PEFT refuses the version of torchao that torchtune needs."""
    folder, own = str(packages("TORCHTUNE")), RECIPE.read_text()
    source, added = changed(own)
    assert added <= 12
    (stock,), (found,) = (
        ranks(1, tmp_path / str(i), lambda _, x=x: run(folder, x)) for i, x in enumerate((own, source))
    )
    assert_same_training(stock, found)
