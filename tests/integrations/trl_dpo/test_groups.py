"""Pairs of one prompt, and conversations that begin alike, in TRL's DPOTrainer: every row of a batch may share."""

import functools
import itertools
import random

import pytest

from tests.support.comparison import assert_trained_alike
from tests.support.models.families import FUSED
from tests.support.trl.dpo import adapter, assert_same, recorded_layouts, train_both

PAIRS_OF_A_PROMPT = 4
PROMPT, ANSWERS = 9, (3, 6)


def words(rng: random.Random, n: int) -> str:
    return " ".join(f"w{rng.randrange(94)}" for _ in range(n))


def pairs_of_prompts() -> list[dict[str, str]]:
    rng = random.Random(0)
    prompts = [words(rng, PROMPT) for _ in range(4)]
    lengths = [rng.randint(*ANSWERS) for _ in range(2)]
    return [
        {"prompt": f"{p} ", **{name: words(rng, n) for name, n in zip(("chosen", "rejected"), lengths, strict=True)}}
        for p in prompts
        for _ in range(PAIRS_OF_A_PROMPT)
    ]


def pairs_of_ranked_answers() -> list[dict[str, str]]:
    """All pairs of four answers, for prompts behind one system prompt. The answers begin alike."""
    rng, rows = random.Random(2), []
    system, beginning = words(rng, PROMPT), words(rng, 2)
    for _ in range(3):
        question = f"{system} {words(rng, PROMPT)} "
        answers = [f"{beginning} {words(rng, rng.randint(*ANSWERS))}" for _ in range(4)]
        rows += [{"prompt": question, "chosen": a, "rejected": b} for a, b in itertools.combinations(answers, 2)]
    return rows


def turns_of_conversations() -> list[dict[str, str]]:
    """Each prompt continues the one before."""
    rng, rows = random.Random(1), []
    for _ in range(4):
        prompt = words(rng, 6)
        for _ in range(PAIRS_OF_A_PROMPT):
            rows.append({"prompt": f"{prompt} ", "chosen": words(rng, 4), "rejected": words(rng, 3)})
            prompt = f"{prompt} {rows[-1]['chosen']} {words(rng, 3)}"
    return rows


@pytest.fixture
def both(tmp_path):
    """Trains stock and patched in batches of 8 pairs."""
    options = dict(per_device_train_batch_size=8, max_steps=2)
    return functools.partial(train_both, tmp_path, **options)


@pytest.fixture
def layouts(monkeypatch):
    return recorded_layouts(monkeypatch)


CASES = {
    "llama": dict,
    "adapter": adapter,
    "experts and their router's loss": lambda: dict(
        kind="mixtral", tiny=FUSED["mixtral"][1] | dict(router_aux_loss_coef=0.5)
    ),
    "conversations": lambda: dict(data=turns_of_conversations()),
    "pairs of ranked answers": lambda: dict(data=pairs_of_ranked_answers()),
    "ranked answers in a window": lambda: dict(
        kind="mistral", tiny=dict(sliding_window=20), data=pairs_of_ranked_answers()
    ),
    "equal pairs": lambda: dict(data=pairs_of_prompts()[:1] * 16),
    "sliding window": lambda: dict(kind="mistral", tiny=dict(sliding_window=5)),
}


@pytest.mark.parametrize("name", CASES)
def test_same_training(both, layouts, name):
    assert_trained_alike(both(**{"data": pairs_of_prompts()} | CASES[name]()), policy=2, reference=2)
    assert all(layout.multiplicity.max() > 2 for layout in layouts), "more rows than those of a pair share"


def test_prompts_that_are_not_shared(both, layouts):
    assert_same(*both(data=pairs_of_prompts(), share_prompts=False))
    assert all(layout.multiplicity.max() == 1 for layout in layouts)
