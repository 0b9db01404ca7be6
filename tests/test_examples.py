"""Every example runs on a tiny model and uses the fused path."""

import json
import re
from pathlib import Path

import pytest

from tests.support.models.multimodal import tiny_multimodal
from tests.support.programs.warm import run_program
from tests.support.trl.dpo import pairs, tiny_model, tokenizer
from tests.support.trl.vision import llava_with_chat_template

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNS = {
    "dpo_loop": ["--steps", "4", "--batch-size", "4"],
    "trl_dpo": ["--epochs", "2", "--batch-size", "4"],
    "trl_vision_dpo": ["--pairs", "8", "--size", "16"],
    "trl_online_dpo": ["--steps", "2", "--batch-size", "2", "--max-new-tokens", "4"],
    "trl_grpo": ["--steps", "2", "--prompts", "2", "--completions", "2", "--max-new-tokens", "4"],
    "precompute": ["--steps", "2", "--batch-size", "4"],
}
CALLS = {
    "dpo_loop": set(),
    "trl_dpo": {
        ("trl.DPOTrainer", "policy", "fused"),
        ("trl.DPOTrainer", "eval", "fused"),
        ("trl.DPOTrainer", "reference", "fused"),
        ("trl.DPOTrainer", "reference", "remembered"),
    },
    "trl_vision_dpo": {("trl.DPOTrainer", kind, "fused") for kind in ("policy", "reference")},
    "trl_online_dpo": {("trl.OnlineDPOTrainer", kind, "fused") for kind in ("policy", "reference")},
    "trl_grpo": {("trl.GRPOTrainer", kind, "fused") for kind in ("policy", "old_policy", "reference")},
    "precompute": {("trl.DPOTrainer", kind, "fused") for kind in ("policy", "reference")},
}


DRAWS_ITS_PAIRS = {"trl_vision_dpo"}


@pytest.fixture(scope="module")
def model_and_pairs(tmp_path_factory):
    """Maps whether an example takes pairs from a file to the arguments that name its model and its pairs."""
    directory = tmp_path_factory.mktemp("example")
    tiny_multimodal("llava").save_pretrained(directory / "vision")
    llava_with_chat_template().save_pretrained(directory / "vision")
    tiny_model().save_pretrained(directory / "model")
    tokenizer().save_pretrained(directory / "model")
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(20)))
    of_text = ["--model", str(directory / "model"), "--dataset", str(directory / "pairs.jsonl")]
    return {True: of_text, False: ["--model", str(directory / "vision")]}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS) == set(CALLS)


def run(name: str, inputs: list[str], directory: Path) -> set[tuple[str, ...]]:
    """Runs an example. Returns the trainer, model and path of each kind of call that it reports."""
    done = run_program(EXAMPLES / f"{name}.py", *inputs, *RUNS[name], cwd=directory, env={"FASTDPO_STRICT": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    calls = re.findall(r"^(\S+): \d+ (\w+) calls of the (\w+) model$", done.stdout, re.M)
    return {(trainer, model, path) for trainer, path, model in calls}


@pytest.mark.parametrize("name", RUNS)
def test_example(name, model_and_pairs, tmp_path):
    inputs = model_and_pairs[name not in DRAWS_ITS_PAIRS]
    assert run(name, inputs, tmp_path) == CALLS[name]
    if name == "precompute":
        assert run(name, inputs, tmp_path) == {("trl.DPOTrainer", "policy", "fused")}
