"""`fastdpo doctor` reports what is there, what is missing, and what is wrong."""

import importlib.metadata
import json
import re

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from fastdpo.commands import doctor
from fastdpo.commands.doctor import FAILED, OFF, OK
from fastdpo.ops.choice import notes, tuning
from tests.support.documents.markdown_blocks import blocks
from tests.support.programs.warm import run_program
from tests.support.programs.workload import TINY
from tests.support.trl.dpo import tiny_model
from tests.support.trl.reward import reward_model

CPU = torch.device("cpu")


def run(*arguments):
    return run_program("-m", "fastdpo", "doctor", *arguments)


def statuses(findings):
    return {finding.name: finding.status for finding in findings}


def test_the_command_finds_this_machine_well(tmp_path):
    done = run("--json", "trl.DPOTrainer", "--model", TINY.write_model(tmp_path / "model"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    sections = {name: {x["name"]: x["status"] for x in findings} for name, findings in report["sections"].items()}
    assert sections["packages"]["torch"] == OK
    assert sections["trainers"] == {"trl.DPOTrainer": OK}
    assert sections[f"model {tmp_path / 'model'}"] == {"packing and fused head": OK, "shared prompts": OK}


def test_the_report_in_the_documentation(tmp_path):
    """Its lines are those of this machine, whatever the versions are."""
    TINY.write_model(tmp_path / "model")
    done = run("trl.DPOTrainer", "--model", tmp_path / "model")
    (_, documented) = [block.code for block in blocks("text") if block.page == "docs/check.md"]

    def lines(report):
        return re.findall(r"^(\S+(?: on)?|  \S+ +\S+(?:, \w+)?)", report, re.M)

    printed = iter(lines(done.stdout))
    assert all(line in printed for line in lines(documented)), "in this order, as `in` goes on from the last one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["openrlhf"], "openrlhf is not installed"),
        (["trl.Trainer"], "targets must be among"),
        (["--model", "/no/model"], "/no/model"),
    ],
)
def test_what_was_asked_for_and_is_missing_fails_the_command(arguments, message):
    done = run(*arguments)
    assert done.returncode == 1
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_without_an_installation_requirements_are_not_checked(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    found = {finding.name: finding for finding in doctor.package_findings()}
    assert found["requirements"].status == OFF
    assert found["requirements"].detail == "not checked: fastdpo runs from its sources and is not installed"
    assert found["trl"].status == OK


def test_a_script_that_imports_something_else(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fastdpo").mkdir()  # such as a clone
    assert next(doctor.package_findings()).status == OK
    script = tmp_path / "fastdpo.py"
    script.write_text("raise SystemExit")
    finding = next(doctor.package_findings())
    assert finding.status == FAILED
    assert finding.detail.endswith(f", but a script in {tmp_path} imports {script}: rename it")


def test_trainers_that_nobody_asked_for_may_be_missing(monkeypatch):
    report = doctor.examine()
    assert {"trl.DPOTrainer", "trl.OnlineDPOTrainer", "trl.KTOTrainer"} <= statuses(report["trainers"]).keys()
    assert statuses(report["packages"])["openrlhf"] == OFF
    assert not doctor.failed(report)
    assert "  ok      trl.DPOTrainer" in doctor.as_text(report)


BLOOM = dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)


def test_a_model_with_dropout():
    model = tiny_model().eval()
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1))
    findings = list(doctor.model_findings(model))
    assert statuses(findings) == {"packing and fused head": OK, "shared prompts": OK}
    assert findings[1].detail == "one dropout mask for both rows"
    assert not model.training


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("packing and fused head", lambda: BloomForCausalLM(BloomConfig(**BLOOM)), "its attention"),
        ("packing and fused head", lambda: tiny_model(attention_dropout=0.1), "attention dropout is active"),
        ("packing", lambda: reward_model(num_labels=3), "[several-labels]"),
        ("packing", lambda: reward_model(attention_dropout=0.1), "[attention-dropout]"),
    ],
)
def test_a_model_that_is_not_fused(name, model, reason):
    (finding,) = doctor.model_findings(model())
    assert (finding.status, finding.name) == (FAILED, name)
    assert reason in finding.detail


@pytest.mark.parametrize("padding", [None, 0])
def test_a_reward_model(padding):
    findings = list(doctor.model_findings(reward_model(pad_token_id=padding)))
    assert statuses(findings) == {"packing": OK, "shared prompts": OK}
    assert findings[0].detail == "LlamaForSequenceClassification"


def test_choices_that_were_measured_are_listed(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    assert [finding.name for finding in doctor.choice_findings(CPU)] == ["built-in"]
    monkeypatch.setattr(tuning, "TUNED_DEVICES", ("cpu",))
    assert [finding.name for finding in doctor.choice_findings(CPU)] == ["none"]
    choice = tuning.Choice("torch", {"torch": 1.5, "triton": "OutOfResources: shared memory"})
    notes.note(CPU, choices={"packed_attention T 4096": choice._asdict(), "damaged": None})
    notes.note(CPU, layers={"LlamaForCausalLM": notes.Compiled(12.3, 0.31)})
    finding, of_layers = doctor.choice_findings(CPU)
    assert of_layers.name == "compiled layers of LlamaForCausalLM"
    assert of_layers.detail == "compiling them takes 12 s, and saves 31% of a step"
    assert finding.name == "packed_attention T 4096"
    assert finding.detail == "torch (torch: 1.500 ms; triton: OutOfResources: shared memory)"


def test_a_kernel_that_does_not_work_is_a_failure(monkeypatch):
    def outcome(trial, device, dtype):
        return "OutOfResources: shared memory" if dtype == torch.bfloat16 else None

    monkeypatch.setattr(doctor.verdicts, "outcome", outcome)
    found = statuses(doctor.kernel_findings(CPU))
    kernels = ["token_logps", "linear_logps", "target_logits"]
    assert {name for name, status in found.items() if status == OK} == {
        *(f"{kernel}, float32" for kernel in kernels),
        *(f"{kernel}, float16" for kernel in [*kernels, "packed_attention"]),
    }
    assert {name for name, status in found.items() if status == FAILED} == {
        f"{kernel}, bfloat16" for kernel in [*kernels, "packed_attention"]
    }
