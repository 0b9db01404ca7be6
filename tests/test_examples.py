"""Every example runs on a tiny model and uses the fused path."""

import contextlib
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.models.multimodal import tiny_multimodal
from tests.support.programs.warm import run_program
from tests.support.trl.dpo import pairs, tiny_model, tokenizer
from tests.support.trl.vision import llava_with_chat_template
from tests.support.workers.processes import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNS = {
    "dpo_loop": ["--steps", "4", "--batch-size", "4"],
    "trl_dpo": ["--epochs", "2", "--batch-size", "4"],
    "trl_vision_dpo": ["--pairs", "8", "--size", "16"],
    "trl_online_dpo": ["--steps", "2", "--batch-size", "2", "--max-new-tokens", "4"],
    "trl_grpo": ["--steps", "2", "--prompts", "2", "--completions", "2", "--max-new-tokens", "4"],
    "precompute": ["--steps", "2", "--batch-size", "4"],
    "custom_layers": ["--steps", "4"],
}
CALLS = {
    "dpo_loop": {("fastdpo.ref_logps", "reference", "fused"), ("fastdpo.score", "policy", "fused")},
    "trl_dpo": {
        ("trl.DPOTrainer", "policy", "fused"),
        ("trl.DPOTrainer", "eval", "fused"),
        ("trl.DPOTrainer", "reference", "fused"),
    },
    "trl_vision_dpo": {("trl.DPOTrainer", kind, "fused") for kind in ("policy", "reference")},
    "trl_online_dpo": {("trl.OnlineDPOTrainer", kind, "fused") for kind in ("policy", "reference")},
    "trl_grpo": {("trl.GRPOTrainer", kind, "fused") for kind in ("policy", "old_policy", "reference")},
    "precompute": {("trl.DPOTrainer", kind, "fused") for kind in ("policy", "reference")},
    "custom_layers": set(),  # it calls ops itself
}


INPUTS = {"trl_vision_dpo": "images", "custom_layers": "none"}
"""The examples that are not given a model and pairs of text."""


@pytest.fixture(scope="module")
def model_and_pairs(tmp_path_factory):
    """Maps what an example trains on to the arguments that name its model and its pairs."""
    directory = tmp_path_factory.mktemp("example")
    tiny_multimodal("llava").save_pretrained(directory / "vision")
    llava_with_chat_template().save_pretrained(directory / "vision")
    tiny_model().save_pretrained(directory / "model")
    tokenizer().save_pretrained(directory / "model")
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(20)))
    of_text = ["--model", str(directory / "model"), "--dataset", str(directory / "pairs.jsonl")]
    return {"text": of_text, "images": ["--model", str(directory / "vision")], "none": []}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS) == set(CALLS)


def test_the_loop_trains_on_two_processes(model_and_pairs, tmp_path):
    """With half of the pairs for each of them."""
    run_ranks(2, run_rank, tmp_path, ["dpo_loop.py", *model_and_pairs["text"], "--steps", "4", "--batch-size", "2"])
    logs = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert "fastdpo.score: 4 fused calls of the policy model" in logs[0]
    assert not logs[1]


def run_rank(directory: Path, arguments: list[str]) -> None:
    sys.argv = arguments
    with (directory / f"rank{os.environ['RANK']}").open("w") as log, contextlib.redirect_stdout(log):
        names = runpy.run_path(str(EXAMPLES / arguments[0]))
    weights = torch.stack([x.detach().double().sum() for x in names["policy"].parameters()])
    gathered = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(gathered, weights)
    assert torch.equal(*gathered), "DDP averages gradients, so the weights are equal"


def run(name: str, inputs: list[str], directory: Path) -> set[tuple[str, ...]]:
    """Runs an example. Returns the trainer, model and path of each kind of call that it reports."""
    done = run_program(EXAMPLES / f"{name}.py", *inputs, *RUNS[name], cwd=directory, env={"FASTDPO_STRICT": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    calls = re.findall(r"^(\S+): \d+ (\w+) calls of the (\w+) model$", done.stdout, re.M)
    return {(trainer, model, path) for trainer, path, model in calls}


@pytest.mark.parametrize("name", RUNS)
def test_example(name, model_and_pairs, tmp_path):
    inputs = model_and_pairs[INPUTS.get(name, "text")]
    assert run(name, inputs, tmp_path) == CALLS[name]
    if name == "precompute":
        assert run(name, inputs, tmp_path) == {("trl.DPOTrainer", "policy", "fused")}
