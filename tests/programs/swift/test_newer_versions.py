"""A newer version of ms-swift is on by what its code is: copies of the installed one with the version 4.7.0."""

import importlib.metadata

import pytest

from fastdpo.integrations.patching import examine
from tests.support.copies import (
    assert_changes_are_noticed,
    assert_documented,
    assert_recorded,
    assert_reported_and_trained,
    train_program,
)

NAME = "swift.DPOTrainer"
TRAINER, MIXIN = "rlhf_trainers/dpo_trainer.py", "rlhf_trainers/rlhf_mixin.py"
MASK = "loss_mask = labels != label_pad_token_id\n"
OTHER_MASK = "loss_mask = (labels != label_pad_token_id) & (torch.arange(labels.shape[1]) % 2 == 0)\n"
COPIES = {
    "unchanged": [],
    "another loss": [(TRAINER, "return losses, chosen_rewards, ", "return 1.5 * losses, chosen_rewards, ")],
    "other positions": [(MIXIN, MASK, OTHER_MASK)],
}
NEWER = f"{NAME} (4.7.0): on, provisionally: newer than the tested versions, ms-swift>=4.6,<4.7, "
REPORTS = {
    "unchanged": f"{NEWER}whose code is the same where it is compared",
    "another loss": f"{NEWER}where swift.rlhf_trainers.dpo_trainer.DPOTrainer.dpo_loss differs: its first calls are "
    "compared with stock ones",
    "other positions": f"{NAME} (4.7.0): off, it is newer than the tested versions, in which other code stands for "
    "swift.rlhf_trainers.rlhf_mixin.RLHFTrainerMixin.get_per_token_logps [changed-code]",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return train_program(NAME, "4.7.0", COPIES, tmp_path_factory.mktemp("copies"))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_what_its_stock_trains(results, name):
    assert_reported_and_trained(results[name], REPORTS[name])


def test_the_reports_are_documented():
    assert_documented("swift.md", REPORTS.values())


def test_the_fingerprints_are_those_of_the_installed_version():
    assert_recorded("swift.rlhf_trainers.kto_trainer.")


@pytest.mark.parametrize("trl", ["0.29.1", "0.30.0"])
def test_trainers_that_run_functions_of_TRL_need_a_tested_version_of_it(monkeypatch, trl):
    version = importlib.metadata.version
    versions = {"ms-swift": "4.7.0", "trl": trl}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or version(name))
    seams = {seam.name: seam for seam in examine("swift").seams}
    assert all(seams[f"swift.{kind}Trainer"].provisional for kind in ("DPO", "KTO"))
    for kind in ("CPO", "ORPO"):
        seam = seams[f"swift.{kind}Trainer"]
        assert seam.on == (trl == "0.29.1")
        assert seam.on or "install 'trl>=0.28,<0.30'" in seam.reason


def test_each_change_of_a_function_that_an_option_relies_on_is_noticed(monkeypatch):
    assert_changes_are_noticed(monkeypatch, "swift.DPOTrainer", "group_prompts")
