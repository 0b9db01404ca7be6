"""The command `llamafactory-cli train`, as it is and by `fastdpo run`."""

import json
import subprocess
import sys

import pytest
from llamafactory_runs import DATASETS, write_data

from tests.support.programs.harness import BIN, Run, assert_same, on, said
from tests.support.programs.workload import TINY

LORA = dict(finetuning_type="lora", lora_target="q_proj,v_proj", lora_rank=8)
CALLS = {
    "dpo": {"policy": 1, "reference": 1},
    "kto": {"policy": 2, "reference": 1},
    "simpo": {"policy": 1},
    "rm": {"policy": 1},
}
"""Calls of models in each step."""
TRAINERS = {"dpo": "llamafactory.DPOTrainer", "kto": "llamafactory.KTOTrainer", "rm": "llamafactory.PairwiseTrainer"}


def command(output, workload, stage, **options):
    directory = output.parent
    if not (directory / "model").exists():
        config = workload.write_model(directory / "model") / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "summary_dropout_prob": 0.0}))
        write_data(directory, workload.pairs_of_text())
    arguments = {
        "model_name_or_path": str(directory / "model"),
        "stage": stage,
        "do_train": True,
        "finetuning_type": "full",
        "dataset": DATASETS.get(stage, stage),
        "dataset_dir": str(directory),
        "template": "empty",
        "cutoff_len": 1024,
        "output_dir": str(output),
        "per_device_train_batch_size": workload.batch,
        "max_steps": workload.steps,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        **options,
    }
    path = directory / f"{output.name}.yaml"
    path.write_text(json.dumps(arguments))
    return ["llamafactory-cli", "train", path]


def without_logits(run: Run) -> Run:
    """A run without the metrics of logits, which are other means when they are fused."""
    return run._replace(logs=[{name: x for name, x in log.items() if "logits/" not in name} for log in run.logs])


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        pytest.param("dpo", {}, marks=pytest.mark.thorough),
        pytest.param("dpo", LORA, marks=pytest.mark.thorough),
        pytest.param("dpo", dict(pref_loss="simpo"), marks=pytest.mark.thorough),
        ("dpo", LORA | dict(pref_loss="simpo")),
        ("kto", {}),
        ("rm", {}),
    ],
    ids=["dpo", "dpo-lora", "simpo", "simpo-lora", "kto", "rm"],
)
def test_the_command_trains_fused_with_the_same_numbers(stage, options, workload, train_both, record):
    stock, fused = map(without_logits, train_both(lambda output: command(output, workload, stage, **options)))
    assert_same(stock, fused)
    trainer = TRAINERS[stage]
    calls = CALLS[options.get("pref_loss", stage)]
    assert fused.calls == {(trainer, kind, "fused"): n * workload.steps for kind, n in calls.items()}
    imported = ["llamafactory.KTOTrainer", "llamafactory.PairwiseTrainer"]  # by every stage
    assert said(fused.stderr) == on(*imported, *(["trl.DPOTrainer", trainer] if stage == "dpo" else []))
    changed = " ".join(f"{name}={value}" for name, value in options.items() if name in ("finetuning_type", "pref_loss"))
    record("LLaMA-Factory", "llamafactory", f"llamafactory-cli train stage={stage} {changed}".strip(), stock, fused)


@pytest.mark.parametrize("stage", ["dpo", pytest.param("kto", marks=pytest.mark.thorough)])
def test_processes_of_torchrun(stage, train_both):
    variables = dict(FORCE_TORCHRUN="1", NPROC_PER_NODE="2", PATH=f"{BIN}:/usr/bin:/bin")
    stock, fused = map(without_logits, train_both(lambda output: command(output, TINY, stage), **variables))
    assert_same(stock, fused)
    trainer = TRAINERS[stage]
    assert fused.calls == {(trainer, kind, "fused"): n * TINY.steps for kind, n in CALLS[stage].items()}


IMPORTS = {
    "patched first": "fastdpo.patch(); import llamafactory.train.tuner",
    "patched last": "import llamafactory.train.tuner; fastdpo.patch()",
    "TRL could not be imported": """
try:
    fastdpo.patch("trl.DPOTrainer")
except fastdpo.PatchError:
    import llamafactory.train.tuner
    fastdpo.patch()
""",
}


# The last one does what "patched last" does, after a `patch` that fails.
@pytest.mark.parametrize(
    "order", [pytest.param(x, marks=[pytest.mark.thorough] * (x == "patched last")) for x in IMPORTS]
)
def test_orders_of_imports(order, tmp_path):
    """TRL 0.24 cannot be imported next to transformers 5 before LLaMA-Factory is."""
    _, _, arguments = command(tmp_path / "out", TINY, "dpo", max_steps=1)
    train = f"from llamafactory.train.tuner import run_exp\nrun_exp({json.loads(arguments.read_text())!r})"
    code = f"import fastdpo\n{IMPORTS[order]}\n{train}\nprint(dict(fastdpo.calls))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    name = "llamafactory.DPOTrainer"
    assert str({(name, "policy", "fused"): 1, (name, "reference", "fused"): 1}) in done.stdout
    assert "not fused" not in done.stderr
