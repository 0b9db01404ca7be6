"""A newer version of OpenRLHF is on by what its code is: copies of the installed one with the version 0.12.0."""

import pytest

from tests.support.copies import (
    assert_changes_are_noticed,
    assert_documented,
    assert_recorded,
    assert_reported_and_trained,
    train_program,
)

NAME = "openrlhf.DPOTrainer"
TRAINER, ACTOR = "trainer/dpo_trainer.py", "models/actor.py"
LOSS, SCALED = "                    preference_loss\n", "                    1.5 * preference_loss\n"
EVALUATION = '                "acc_mean": acc_sum / num_samples,\n'
LABELS = "        log_probs = log_probs_from_logits(output"
COPIES = {
    "unchanged": [],
    "another loss": [(TRAINER, LOSS, SCALED), (TRAINER, EVALUATION, f'{EVALUATION}                "one": 1.0,\n')],
    "other positions": [(TRAINER, "mask[:source_len] = False", "mask[: source_len + 1] = False")],
    "another actor": [(ACTOR, LABELS, LABELS.replace("(output", "(1.25 * output"))],
}
NEWER = f"{NAME} (0.12.0): on, provisionally: newer than the tested versions, openrlhf>=0.9.10,<0.12, "
OFF = f"{NAME} (0.12.0): off, it is newer than the tested versions, in which other code stands for "
REPORTS = {
    "unchanged": f"{NEWER}whose code is the same where it is compared",
    "another loss": f"{NEWER}where openrlhf.trainer.dpo_trainer.DPOTrainer.evaluate differs: its first calls are "
    "compared with stock ones",
    "other positions": f"{OFF}openrlhf.trainer.dpo_trainer.DPOTrainer._get_batch_logps [changed-code]",
    "another actor": f"{OFF}openrlhf.models.actor.Actor.forward [changed-code]",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return train_program(NAME, "0.12.0", COPIES, tmp_path_factory.mktemp("copies"))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_what_its_stock_trains(results, name):
    assert_reported_and_trained(results[name], REPORTS[name])


def test_the_reports_are_documented():
    assert_documented("openrlhf.md", (REPORTS[name] for name in COPIES if name != "another actor"))


def test_the_fingerprints_are_those_of_the_installed_version():
    assert_recorded("openrlhf.models.actor.")


def test_each_change_of_a_function_that_an_option_relies_on_is_noticed(monkeypatch):
    assert_changes_are_noticed(monkeypatch, "openrlhf.DPOTrainer", "reference_memory")
