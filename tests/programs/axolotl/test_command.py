"""The command `axolotl train`, as it is, by `fastdpo run`, and with the plugin in its configuration."""

import json
import os

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.programs.harness import BIN, assert_same, on, run, said
from tests.support.programs.workload import TINY

LORA = dict(adapter="lora", lora_r=4, lora_alpha=8, lora_target_modules=["q_proj", "v_proj"], plugins=["seeded.Plugin"])
SEEDED = """
import torch
from axolotl.integrations.base import BasePlugin

class Plugin(BasePlugin):
    def post_model_load(self, cfg, model):
        torch.manual_seed(0)
"""
"""axolotl sets no seed before it creates an adapter."""
OFFLINE = dict(ACCELERATE_USE_CPU="true", DO_NOT_TRACK="1", AXOLOTL_DO_NOT_TRACK="1", WANDB_MODE="disabled")
PLUGIN = dict(plugins=["fastdpo.integrations.axolotl.FastDPOPlugin"])
TRAINER = "trl.DPOTrainer"
TRAINERS = "trl.DPOTrainer", "trl.OnlineDPOTrainer", "trl.RewardTrainer"


def command(output, workload, launcher="python", rl="dpo", **options):
    directory = output.parent
    if not (directory / "model").exists():
        workload.write_model(directory / "model")
        rows = [{**pair, **answer(i, pair)} for i, pair in enumerate(workload.pairs_of_text())]
        (directory / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = dict(prompt="{prompt}", chosen=" {chosen}", rejected=" {rejected}")
    if rl == "kto":
        columns = dict(prompt="{prompt}", completion=" {completion}")
    formats = {f"{name}_format": text for name, text in columns.items()}
    fields = {f"field_{name}": name for name in columns} | (dict(field_label="label") if rl == "kto" else {})
    data = {"path": str(directory / "train.jsonl"), "ds_type": "json", "split": "train", "type": {**fields, **formats}}
    arguments = {
        "base_model": str(directory / "model"),
        "rl": rl,
        "datasets": [data],
        "dataset_prepared_path": str(output.with_name(f"{output.name}-prepared")),
        "dataset_num_proc": 1,
        "output_dir": str(output),
        "sequence_len": 1024,
        "micro_batch_size": workload.batch,
        "gradient_accumulation_steps": 1,
        "max_steps": workload.steps,
        "num_epochs": 1,
        "optimizer": "sgd",
        "lr_scheduler": "constant",
        "learning_rate": 1.0,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "seed": 1,
        "special_tokens": {"pad_token": "<pad>"},
        "remove_unused_columns": False,
        **options,
    }
    path = directory / f"{output.name}.yaml"
    path.write_text(json.dumps(arguments))
    return ["axolotl", "train", path, "--launcher", launcher]


def reward_command(output, workload, **options):
    """Trains a reward model, whose new head is saved with the weights, since axolotl sets no seed before it."""
    _, _, path, *launcher = command(output, workload, rl=None, **options)
    directory = output.parent
    if not (directory / "reward").exists():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(directory / "model", num_labels=1)
        model.save_pretrained(directory / "reward")
        workload.tokenizer().save_pretrained(directory / "reward")
        rows = [{"system": "", "input": x["prompt"], **x} for x in workload.pairs_of_text()]
        (directory / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = json.loads(path.read_text())
    arguments["datasets"][0]["type"] = "bradley_terry.chat_template"
    arguments |= {"base_model": str(directory / "reward"), "reward_model": True, "chat_template": "tokenizer_default"}
    path.write_text(json.dumps(arguments))
    return ["axolotl", "train", path, *launcher]


def answer(i, pair):
    """The columns of KTO: one of the two answers, and whether it is the better one."""
    return {"completion": pair["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}


@pytest.fixture(autouse=True)
def _seeded_plugin(tmp_path, monkeypatch):
    (tmp_path / "seeded.py").write_text(SEEDED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def fused_calls(workload):
    return {(TRAINER, role, "fused"): workload.steps for role in ("policy", "reference")}


@pytest.mark.parametrize(
    "options",
    [
        LORA | dict(rl="ipo"),
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ({}, LORA, dict(rl="ipo"))),
    ],
    ids=["ipo lora", "full", "lora", "ipo"],
)
def test_the_command_trains_fused_with_the_same_numbers(options, workload, train_both, record):
    stock, fused = train_both(lambda output: command(output, workload, **options), **OFFLINE)
    assert_same(stock, fused)
    assert fused.calls == fused_calls(workload)
    assert said(fused.stderr) == on("trl.RewardTrainer", TRAINER)
    changed = " ".join(
        f"{name}={value}" for name, value in ({"rl": "dpo"} | options).items() if name in ("rl", "adapter")
    )
    record("axolotl", "axolotl", f"axolotl train {changed}", stock, fused)


def test_the_plugin_trains_as_fastdpo_run_does(tmp_path):
    """Without `fastdpo run`, in a process that accelerate launches, which is axolotl's default."""
    variables = dict(PATH=f"{BIN}:/usr/bin:/bin", **OFFLINE)
    stock = run(command(tmp_path / "stock", TINY, "accelerate"), tmp_path / "stock", fused=False, **variables)
    assert not stock.calls
    output = tmp_path / "plugin"
    plugin = run(command(output, TINY, "accelerate", **PLUGIN), output, fused=False, **variables)
    assert_same(stock, plugin)
    assert plugin.calls == fused_calls(TINY)
    (report,) = said(plugin.stderr)
    assert "trl.DPOTrainer" in report
    assert "off" not in report


@pytest.mark.parametrize(
    "options",
    [dict(center_rewards_coefficient=0.1), pytest.param({}, marks=pytest.mark.thorough)],
    ids=["centered", "full"],
)
def test_a_reward_model_trains_fused_with_the_same_numbers(options, workload, train_both, record):
    stock, fused = train_both(lambda output: reward_command(output, workload, **options), **OFFLINE)
    # After six steps on long rows, the stock head is 5.3e-6 of its norm from float64, and 5.8e-6 with eager attention.
    assert_same(stock, fused, relative_weights=5e-6 if workload == TINY else 1.2e-5)
    assert fused.calls == {("trl.RewardTrainer", "policy", "fused"): workload.steps}
    assert said(fused.stderr) == on("trl.RewardTrainer", TRAINER)
    record("axolotl", "axolotl", " ".join(["axolotl train reward_model=true", *options]), stock, fused)


def test_a_plugin_that_axolotl_would_not_call_raises(monkeypatch):
    from fastdpo.integrations import axolotl

    axolotl.FastDPOPlugin()
    monkeypatch.delattr(axolotl.BasePlugin, "pre_model_load")
    with pytest.raises(axolotl.PatchError, match="axolotl's plugins must have pre_model_load; use `fastdpo run`"):
        axolotl.FastDPOPlugin()


def test_the_doctor_names_the_trainer_that_axolotl_trains_with():
    from fastdpo.commands import doctor

    assert doctor.Finding("ok", "axolotl", "0.19.0: trains with trl.DPOTrainer and trl.RewardTrainer") in [
        *doctor.package_findings()
    ]


def test_the_plugin_says_that_another_trainer_is_not_fused(tmp_path):
    output = tmp_path / "kto"
    kto = run(command(output, TINY, rl="kto", **PLUGIN), output, fused=False, **OFFLINE)
    assert not kto.calls
    assert not said(kto.stderr)
    reason = f"axolotl (AxolotlKTOTrainer): not fused, it is not a {' or '.join(TRAINERS)}"
    assert (output / "debug.log").read_text().count(reason) == 1
