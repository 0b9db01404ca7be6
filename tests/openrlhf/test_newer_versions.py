"""A newer version of OpenRLHF is on by what its code is: copies of the installed one with the version 0.12.0."""

import pytest

from fastdpo.integrations import evidence
from tests.support import ROOT
from tests.support.copies import Copy, assert_trains_as_its_stock, train_copies
from tests.support.documents import tested_code

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
    "unchanged": f"{NEWER}whose code is the same",
    "another loss": f"{NEWER}where openrlhf.trainer.dpo_trainer.DPOTrainer.evaluate differs: its first calls are "
    "compared with stock ones",
    "other positions": f"{OFF}openrlhf.trainer.dpo_trainer.DPOTrainer._get_batch_logps [changed-code]",
    "another actor": f"{OFF}openrlhf.models.actor.Actor.forward [changed-code]",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    copies = {name: Copy(NAME, changes) for name, changes in COPIES.items()}
    return train_copies("0.12.0", copies, tmp_path_factory.mktemp("copies"))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_what_its_stock_trains(results, name):
    assert results[name]["report"] == REPORTS[name]
    assert_trains_as_its_stock(results[name], fused=": on" in REPORTS[name])


def test_the_reports_are_documented():
    page = (ROOT / "docs" / "openrlhf.md").read_text()
    assert all(f"\nfastdpo: {REPORTS[name]}\n" in page for name in COPIES if name != "another actor")


def test_the_fingerprints_are_those_of_the_installed_version():
    found = tested_code.found()
    assert any(name.startswith("openrlhf.models.actor.") for name in found)
    assert found == {name: evidence.tested().get(name) for name in found}, tested_code.__doc__
