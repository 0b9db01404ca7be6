"""A newer version of LLaMA-Factory is on by what its code is: copies of the installed one with the version 0.9.6."""

import pytest

from tests.support.copies import (
    assert_changes_are_noticed,
    assert_documented,
    assert_recorded,
    assert_reported_and_trained,
    train_program,
)

NAME = "llamafactory.DPOTrainer"
TRAINER, UTILS = "train/dpo/trainer.py", "train/trainer_utils.py"
AFTER_THE_LOSS = "            if self.bco_gemma > 1e-6:\n"
COPIES = {
    "unchanged": [],
    "another loss": [(TRAINER, AFTER_THE_LOSS, f"            losses = 1.5 * losses\n{AFTER_THE_LOSS}")],
    "other positions": [(UTILS, "labels = labels[:, 1:]", "labels = labels[:, :-1]")],
    "logits in the loss": [(TRAINER, "return losses.mean(), ", "return losses.mean() + policy_chosen_logits.mean(), ")],
}
NEWER = f"{NAME} (0.9.6): on, provisionally: newer than the tested versions, llamafactory==0.9.5, "
OFF = f"{NAME} (0.9.6): off, it is newer than the tested versions, in which other code stands for "
REPORTS = {
    "unchanged": f"{NEWER}whose code is the same where it is compared",
    "another loss": f"{NEWER}where llamafactory.train.dpo.trainer.CustomDPOTrainer.compute_preference_loss differs: "
    "its first calls are compared with stock ones",
    "other positions": f"{OFF}llamafactory.train.trainer_utils.get_batch_logps [changed-code]",
    "logits in the loss": f"{OFF}llamafactory.train.dpo.trainer.CustomDPOTrainer.get_batch_loss_metrics [changed-code]",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return train_program(NAME, "0.9.6", COPIES, tmp_path_factory.mktemp("copies"))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_what_its_stock_trains(results, name):
    assert_reported_and_trained(results[name], REPORTS[name])


def test_the_reports_are_documented():
    assert_documented("llamafactory.md", (REPORTS[name] for name in COPIES if name != "logits in the loss"))


def test_the_fingerprints_are_those_of_the_installed_version():
    assert_recorded("llamafactory.train.kto.")


def test_each_change_of_a_function_that_an_option_relies_on_is_noticed(monkeypatch):
    assert_changes_are_noticed(monkeypatch, "llamafactory.DPOTrainer", "group_prompts")
