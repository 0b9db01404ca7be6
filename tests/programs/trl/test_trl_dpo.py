"""The command `trl dpo` by `fastdpo run`, against the script of TRL that it starts."""

import json
from importlib.util import find_spec

import pytest

from tests.support.programs.harness import assert_same

PROGRAMS = {"stock": [find_spec("trl.scripts.dpo").origin], "fused": ["trl", "dpo", "--num_processes", "1"]}
"""The command starts the script in a new process. The stock training needs the script alone."""


def command(output, workload, **options):
    directory = output.parent
    if not (directory / "data").exists():
        (directory / "data").mkdir()
        rows = "".join(f"{json.dumps(pair)}\n" for pair in workload.pairs_of_text())
        (directory / "data" / "train.jsonl").write_text(rows)
        workload.write_model(directory / "model")
    arguments = {
        "model_name_or_path": directory / "model",
        "dataset_name": directory / "data",
        "output_dir": output,
        "per_device_train_batch_size": workload.batch,
        "max_steps": workload.steps,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        **options,
    }
    return [*PROGRAMS[output.name], *(str(x) for name, value in arguments.items() for x in (f"--{name}", value))]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"use_peft": True}, marks=pytest.mark.thorough)], ids=["full", "lora"]
)
def test_the_command_trains_fused_with_the_same_numbers(options, workload, train_both, record, tmp_path):
    stock, fused = train_both(lambda output: command(output, workload, **options), warm=True)
    assert_same(stock, fused)
    trainer, steps = "trl.DPOTrainer", workload.steps
    assert fused.calls == {(trainer, "policy", "fused"): steps, (trainer, "reference", "fused"): steps}
    record("TRL", "trl", f"trl dpo{' --use_peft true' if options else ''}", stock, fused)
