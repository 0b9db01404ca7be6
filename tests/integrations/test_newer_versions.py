"""Versions of TRL that are newer than the tested ones: on by what their code is.

Copies of the installed TRL have the version 1.17.0, and some of them other code.
"""

import importlib.metadata
import re

import pytest
import torch
from transformers import Trainer
from trl import GRPOTrainer, SFTTrainer

import fastdpo
from fastdpo.commands import doctor
from fastdpo.integrations.admission import evidence, fingerprints, packages
from fastdpo.integrations.lines import LINES, TRAINERS
from fastdpo.integrations.options import specific_options
from fastdpo.integrations.patching import examine
from fastdpo.models import calls as counters
from tests.support import ROOT
from tests.support.comparison import double
from tests.support.copies import Copy, assert_changes_are_noticed, assert_documented, assert_recorded, train_copies
from tests.support.trl.dpo import assert_same, assert_same_bits
from tests.support.workers.trainings import TRAIN, model_of

DPO, UTILS, KERNEL = "trainer/dpo_trainer.py", "trainer/utils.py", "kernels/chunked_logprob.py"
TOKENS = '        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]\n'
METRIC = '        self._metrics[mode]["one"].append(self.accelerator.gather(0 * loss).max().item() + 1)\n'
ARGUMENT = '        peft_config: "PeftConfig | None" = None,\n'
AUXILIARY = "        if self.aux_loss_enabled:\n            aux_loss = outputs"
SFT, LOSS = "trainer/sft_trainer.py", "def _compute_loss(self, model, inputs, return_outputs)"
FUNCTION_ARGUMENT = "        formatting_func: Callable[[dict], str] | None = None,\n"
OUTPUTS = '    outputs: tuple[str, ...] = ("log_probs",),\n'
AUX_LOSS_FIELD = "    aux_loss: torch.Tensor | None = None\n"
LABEL_MASK = "            label_mask=mask,\n"
COPIES = {  # by the name of a copy: file, text, replacement
    "unchanged": [],
    "grown": [
        (DPO, ARGUMENT, f"{ARGUMENT}        more: bool = False,\n"),
        (DPO, TOKENS, TOKENS + METRIC),
        (DPO, LOSS, LOSS.replace("return_outputs", "return_outputs, scale=1")),
        (SFT, FUNCTION_ARGUMENT, f"        more: bool = False,\n{FUNCTION_ARGUMENT}"),
        (SFT, TOKENS, TOKENS + METRIC),
        (UTILS, OUTPUTS, f"{OUTPUTS}    chunk_size: int | None = None,\n"),
        (UTILS, AUX_LOSS_FIELD, f"{AUX_LOSS_FIELD}    z_loss: torch.Tensor | None = None\n"),
    ],
    "another output": [
        (UTILS, AUX_LOSS_FIELD, f"{AUX_LOSS_FIELD}    z_loss: torch.Tensor | None = None\n"),
        (UTILS, LABEL_MASK, f"{LABEL_MASK}            z_loss=log_probs.square().sum(),\n"),
    ],
    "another scale": [(UTILS, "loss = -log_probs.sum() /", "loss = -1.5 * log_probs.sum() /")],
    "another loss": [(DPO, AUXILIARY, f"        loss = 1.5 * loss\n{AUXILIARY}")],
    "another name": [(file, "add_fused_lm_head", "attach_lm_head") for file in (DPO, UTILS)],
    "other positions": [(UTILS, "labels = labels[:, 1:]", "labels = labels[:, :-1]")],
    "another kernel": [(KERNEL, "logprobs = target_logit - log_z\n", "logprobs = 1.25 * (target_logit - log_z)\n")],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of `train_copies` by the names of the copies."""
    copies = {name: Copy("trl.DPOTrainer", changes) for name, changes in COPIES.items()}
    copies["grown, SFT"] = Copy("trl.SFTTrainer", COPIES["grown"])
    return train_copies("1.17.0", copies, tmp_path_factory.mktemp("copies"))


NEWER_PACKAGES = "".join(f"{package}<={packages.PACKAGES[package].tested}, " for package in packages.newer())
ON = f"trl.DPOTrainer (1.17.0): on, provisionally: newer than the tested versions, trl>=1.15,<1.17, {NEWER_PACKAGES}"
COMPARED = f"{ON}where {{}} differs: its first calls are compared with stock ones"
CHANGED = {
    "grown": ["trl.trainer.dpo_trainer.DPOTrainer._compute_loss", "trl.trainer.utils.add_fused_lm_head"],
    "another output": ["trl.trainer.utils.add_fused_lm_head"],
    "another scale": ["trl.trainer.utils.add_fused_lm_head"],
    "another loss": ["trl.trainer.dpo_trainer.DPOTrainer._compute_loss"],
    "other positions": ["trl.trainer.utils.add_fused_lm_head"],
    "another kernel": ["trl.kernels.chunked_logprob.ChunkedLogProbFunction.forward"],
}
REPORTS = {
    "unchanged": f"{ON}whose code is the same where it is compared",
    **{name: COMPARED.format(", ".join(functions)) for name, functions in CHANGED.items()},
    "another name": "trl.DPOTrainer (1.17.0): off, its code differs from the tested versions: "
    "trl.trainer.dpo_trainer.add_fused_lm_head must have the parameters ['model', 'temperature', "
    "'cast_lm_head_to_fp32', 'outputs']; got None [different-code]",
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_what_its_stock_trains(results, name):
    result = results[name]
    stock, patched = result["stock"], result["patched"]
    assert result["report"] == REPORTS[name]
    if name in ("unchanged", "grown", "another loss"):
        assert patched.calls.keys() == {(kind, "fused") for kind in ("policy", "reference", "eval")}
        assert_same(stock, patched)
    else:
        assert all(path == "stock" for _, path in patched.calls)
        assert_same_bits(stock, patched)
    if name == "grown":
        assert all(log["one"] == 1.0 for log in patched.logs if "loss" in log)


def test_a_copy_that_has_grown_trains_SFT(results):
    result = results["grown, SFT"]
    changed = "trl.trainer.sft_trainer.SFTTrainer.compute_loss, trl.trainer.utils.add_fused_lm_head"
    assert result["report"] == COMPARED.format(changed).replace("DPOTrainer", "SFTTrainer", 1)
    assert result["patched"].calls.keys() == {(kind, "fused") for kind in ("policy", "eval")}
    assert_same(result["stock"], result["patched"])
    assert all(log["one"] == 1.0 for log in result["patched"].logs if "loss" in log)


@pytest.mark.parametrize("name", COPIES)
def test_the_report_of_each_copy_is_documented(name):
    report = REPORTS[name].replace(NEWER_PACKAGES, "")
    assert f"\nfastdpo: {report}\n" in (ROOT / "docs" / "trl.md").read_text()


DIFFERENT = {"another output": "z_loss", "another scale": "loss"}


def test_a_difference_is_logged_with_its_size(results):
    reason = r"\(policy\): not fused, code has changed since .*, in {}, and its first call differs .* in {} by"
    for name in ("other positions", "another kernel", "another output", "another scale"):
        assert any(
            re.search(reason.format(*CHANGED[name], DIFFERENT.get(name, "log-prob.*")), message)
            for message in results[name]["messages"]
        )
    assert not any("not fused" in message for name in ("unchanged", "grown") for message in results[name]["messages"])


@pytest.mark.parametrize("name", COPIES)
def test_only_functions_whose_texts_differ_are_parsed(results, name):
    changed = [] if name == "another name" else [x.rpartition(".")[2] for x in CHANGED.get(name, [])]
    assert sorted(results[name]["parsed"]) == sorted(changed)


def test_the_fingerprints_are_those_of_the_installed_versions():
    assert_recorded()


def set_version(monkeypatch, trl):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: trl if name == "trl" else version(name))


@pytest.fixture
def newer(monkeypatch):
    """TRL as it is, with the version 1.17.0."""
    set_version(monkeypatch, "1.17.0")


@pytest.fixture
def changed(newer, monkeypatch):
    """A function that makes functions of a name differ from the tested ones."""

    def change(*names):
        tested = {name: [] if name.rpartition(".")[2] in names else x for name, x in evidence.tested().items()}
        monkeypatch.setattr(evidence, "tested", lambda: tested)

    return change


@pytest.mark.parametrize("trainer", TRAIN)
def test_what_depends_on_a_changed_function_is_left_to_trl(changed, trainer, tmp_path):
    def run(name, cast=lambda model: model):
        return TRAIN[trainer](tmp_path / name, *(cast(model_of(trainer, seed)) for seed in range(2)), evaluate=6)

    stock = run("stock")
    stock.in_float64 = lambda: run("float64", double)
    line = next(line for line in LINES if line.trainer == trainer)
    changed(*line.compared)
    with fastdpo.patched(trainer) as report:
        assert {name.rpartition(".")[2] for name in report.seams[0].changed} <= set(line.compared)
        assert bool(report.seams[0].changed) == bool(line.compared)
        patched = run("patched")
    assert {path for _, path in patched.calls} == {"fused"}
    if line.compared:
        assert_same(stock, patched)
        assert counters.outcomes[trainer, "verified"] >= 2


@pytest.mark.parametrize("trainer", ["trl.OnlineDPOTrainer", "trl.CPOTrainer", "trl.ORPOTrainer"])
def test_a_changed_function_that_is_replaced_is_a_reason(changed, trainer):
    changed("_forward", "concatenated_forward")
    (seam,) = examine(trainer).seams
    assert not seam.on
    assert seam.reason.name == "changed-code"


def test_an_option_that_relies_on_a_changed_function_is_refused(changed):
    changed("_compute_loss")
    with pytest.raises(fastdpo.PatchError, match="_compute_loss, on which max_tokens relies"):
        fastdpo.patch("trl.DPOTrainer", max_tokens=500)
    assert fastdpo.patch("trl.DPOTrainer").seams[0].on


@pytest.mark.parametrize(
    ("trainer", "option"),
    [(trainer, option) for trainer in TRAINERS if trainer.startswith("trl.") for option in specific_options(trainer)],
)
def test_each_change_of_a_function_that_an_option_relies_on_is_noticed(monkeypatch, trainer, option):
    assert_changes_are_noticed(monkeypatch, trainer, option)


def test_another_cadence_of_generations_is_a_reason(monkeypatch, newer):
    monkeypatch.delattr(GRPOTrainer, "_prepare_inputs")  # so that it is the one of `Trainer`
    with pytest.raises(fastdpo.PatchError) as error:
        fastdpo.patch("trl.GRPOTrainer", max_tokens=500)
    assert_documented("trl.md", [str(error.value).removeprefix("patch: fastdpo: ")])
    assert fastdpo.patch("trl.GRPOTrainer").seams[0].provisional.endswith("whose code is the same where it is compared")


def test_a_function_that_is_missing_in_a_newer_version_is_a_reason(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda x: "99.0" if x == "transformers" else version(x))
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(fastdpo.PatchError, match="_run_epoch, on which max_tokens relies"):
        fastdpo.patch("trl.KTOTrainer", max_tokens=500)


def test_a_function_that_a_newer_version_overrides_is_a_reason(monkeypatch, newer):
    namespace = {"__name__": "trl.trainer.sft_trainer", "Trainer": Trainer}
    exec("def get_batch_samples(*args):\n    return Trainer.get_batch_samples(*args)", namespace)
    monkeypatch.setattr(SFTTrainer, "get_batch_samples", namespace["get_batch_samples"], raising=False)
    with pytest.raises(fastdpo.PatchError, match="get_batch_samples, on which max_tokens relies"):
        fastdpo.patch("trl.SFTTrainer", max_tokens=500)


def test_the_doctor_says_why_a_version_is_provisional(changed):
    def trainers():
        return {finding.name: finding for finding in doctor.examine(["trl.DPOTrainer", "trl.ORPOTrainer"])["trainers"]}

    assert trainers()["trl.DPOTrainer"] == doctor.Finding(
        doctor.OK,
        "trl.DPOTrainer",
        f"1.17.0: provisionally, {ON.rpartition('provisionally: ')[2]}whose code is the same where it is compared",
    )
    changed("_compute_loss", "concatenated_forward")
    found = trainers()
    assert found["trl.DPOTrainer"].status == doctor.OK
    assert "_compute_loss differs: its first calls are compared" in found["trl.DPOTrainer"].detail
    assert found["trl.ORPOTrainer"].status == doctor.FAILED
    assert "[changed-code]" in found["trl.ORPOTrainer"].detail


@pytest.mark.parametrize("provisional", [False, True])
def test_an_option_refuses_newer_versions(newer, provisional):
    seam = fastdpo.patch(provisional=provisional).seams[0]
    assert seam.on == provisional
    assert seam.on or seam.reason.name == "unsupported-version"
    assert fastdpo.patch(provisional=provisional).seams[0] == seam
    fastdpo.unpatch()
    if not provisional:
        with pytest.raises(fastdpo.PatchError, match=r"trl>=0.24,<1.17' \[unsupported-version\]"):
            fastdpo.patch("trl.DPOTrainer", provisional=False)


def test_an_option_does_not_change_tested_versions(monkeypatch):
    set_version(monkeypatch, "1.16.0")
    assert fastdpo.patch("trl.DPOTrainer", provisional=False).seams[0].on


@pytest.mark.parametrize("variable", ["0", "1"])
def test_newer_versions_can_be_refused(newer, monkeypatch, variable):
    monkeypatch.setenv("FASTDPO_PROVISIONAL", variable)
    seam = fastdpo.patch().seams[0]
    assert seam.on == (variable == "1")
    assert seam.on or seam.reason.name == "unsupported-version"


def test_a_function_without_source_or_record_has_changed(newer):
    namespace = {"__name__": "trl.made"}
    exec("def f(x):\n    return x", namespace)
    evidence.set_newer("trl", True)
    try:
        for function in (namespace["f"], torch.nn.functional.linear):
            name = fingerprints.name_of(function)
            assert evidence.changed({name: function}, fingerprints.package_of(name)) == {name: [name]}
        assert not evidence.is_tested(namespace["f"])
    finally:
        evidence.set_newer("trl", False)


@pytest.mark.parametrize("version", ["1.17.0", "1.17", "1.17.0rc1", "1.17.0.dev0", "2.0", "1.16.0", "0.20"])
def test_a_version_is_newer_from_its_first_pre_release_on(version):
    assert LINES[0].precedes(version) == version.startswith(("1.17", "2"))


def test_a_version_after_a_single_tested_one_is_newer():
    line = next(line for line in LINES if line.versions == "==0.9.5")
    assert [version for version in ("0.9.4", "0.9.5", "0.9.5.post1", "0.9.6.dev0") if line.precedes(version)] == [
        "0.9.5.post1",
        "0.9.6.dev0",
    ]
