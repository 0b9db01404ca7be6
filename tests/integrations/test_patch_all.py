"""`patch()` without a name, in programs that are written as TRL's example scripts are: a trainer is patched when it is
imported, runs fused, and trains what it trains without fastdpo.

tests/test_run_lines.py imports all trainers, and tests/contract trains them.
"""

import json
import re

import pytest
import torch

from tests.support.programs.warm import run_program
from tests.support.trl.dpo import tokenizer
from tests.support.trl.online import writer
from tests.support.trl.tpo import triples

SCRIPT = """
import sys

if sys.argv[1] == "patched":
    import fastdpo

    print("before:", fastdpo.patch())

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

COMMON = dict(
    output_dir="out", use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=4, logging_steps=1,
    learning_rate=0.5, lr_scheduler_type="constant", optim="sgd", save_strategy="no",
)
LOADED = dict(model_init_kwargs={"dtype": "auto"})  # float64, as the model is saved


def reward(completions, **columns):
    return [float(len(x.split()) % 3) for x in completions]


pairs = load_dataset("json", data_files="pairs.jsonl", split="train")
triples = load_dataset("json", data_files="triples.jsonl", split="train")
prompts = pairs.select_columns(["prompt"])

def with_model(trainer, config, directory="model"):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    args = config(**COMMON, max_length=64)
    return trainer(model=model, args=args, train_dataset=pairs, processing_class=tokenizer)


def by_name(trainer, config, data, rewards={}, **options):
    return trainer(model="model", args=config(**COMMON, **LOADED, **options), train_dataset=data, **rewards)


rewards = dict(reward_funcs=reward)
groups = dict(num_generations=4, beta=0.1, max_completion_length=8, num_iterations=2, steps_per_generation=2)
makers = {
    "trl.GRPOTrainer": lambda: by_name(GRPOTrainer, GRPOConfig, prompts, rewards, **groups),
    "trl.CPOTrainer": lambda: with_model(CPOTrainer, CPOConfig),
    "trl.TPOTrainer": lambda: by_name(TPOTrainer, TPOConfig, triples),
}
results = {"start": AutoModelForCausalLM.from_pretrained("model", dtype="auto").state_dict()}
for name, make in makers.items():
    trainer = make()
    trainer.train()
    results[name] = {key: x for key, x in trainer.model.state_dict().items()}
torch.save(results, f"{sys.argv[1]}.pt")
if sys.argv[1] == "patched":
    print("after:", fastdpo.patch())
    print({key: n for key, n in fastdpo.calls.items()})
"""
KINDS = {
    "trl.GRPOTrainer": {"policy", "old_policy", "reference"},
    "trl.CPOTrainer": {"policy"},
    "trl.TPOTrainer": {"policy"},
}
"""The fused calls of each training."""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The weights after both trainings of each trainer, and what the patched program has printed."""
    directory = tmp_path_factory.mktemp("examples")
    writer().double().save_pretrained(directory / "model")
    tokenizer().save_pretrained(directory / "model")
    rows = triples(16)
    (directory / "triples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{name: x for name, x in row.items() if name != "reference"} for row in rows]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "train.py").write_text(SCRIPT)
    done = {side: run_program("train.py", side, cwd=directory) for side in ("stock", "patched")}
    for each in done.values():
        assert each.returncode == 0, each.stderr[-4000:]
    weights = {side: torch.load(directory / f"{side}.pt") for side in done}
    return weights, done["patched"]


@pytest.mark.parametrize("name", KINDS)
def test_a_trainer_is_fused_without_its_name_and_equal(program, name):
    weights, done = program
    calls = re.findall(rf"\('{re.escape(name)}', '(\w+)', '(\w+)'\): [1-9]", done.stdout)
    assert set(calls) == {(kind, "fused") for kind in KINDS[name]}
    assert "not fused" not in done.stderr
    stock, patched = weights["stock"][name], weights["patched"][name]
    assert stock.keys() == patched.keys()
    assert max((x - weights["stock"]["start"][key]).abs().max() for key, x in stock.items()) > 1e-3
    for key, x in stock.items():
        torch.testing.assert_close(patched[key], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_trainer_has_one_entry_in_the_report(program, name):
    _, done = program
    before, after = (re.search(rf"^{x}: (fastdpo: .*)$", done.stdout, re.M)[1] for x in ("before", "after"))
    for report, state in ((before, "on when imported"), (after, "on")):
        assert report.count(name) == 1
        (entry,) = (part for part in report.split(" | ") if name in part)
        assert entry.endswith(f": {state}")
    assert "trl.SFTTrainer" not in before + after
