"""A newer version of LLaMA-Factory is on by what its code is: copies of the installed one with the version 0.9.6."""

import pytest

from fastdpo.integrations import evidence
from tests.support import ROOT
from tests.support.copies import Copy, assert_trains_as_its_stock, train_copies
from tests.support.documents import tested_code

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
    "unchanged": f"{NEWER}whose code is the same",
    "another loss": f"{NEWER}where llamafactory.train.dpo.trainer.CustomDPOTrainer.compute_preference_loss differs: "
    "its first calls are compared with stock ones",
    "other positions": f"{OFF}llamafactory.train.trainer_utils.get_batch_logps [changed-code]",
    "logits in the loss": f"{OFF}llamafactory.train.dpo.trainer.CustomDPOTrainer.get_batch_loss_metrics [changed-code]",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    copies = {name: Copy(NAME, changes) for name, changes in COPIES.items()}
    return train_copies("0.9.6", copies, tmp_path_factory.mktemp("copies"))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_what_its_stock_trains(results, name):
    assert results[name]["report"] == REPORTS[name]
    assert_trains_as_its_stock(results[name], fused=": on" in REPORTS[name])


def test_the_reports_are_documented():
    page = (ROOT / "docs" / "llamafactory.md").read_text()
    assert all(f"\nfastdpo: {REPORTS[name]}\n" in page for name in COPIES if name != "logits in the loss")


def test_the_fingerprints_are_those_of_the_installed_version():
    found = tested_code.found()
    assert any(name.startswith("llamafactory.train.kto.") for name in found)
    assert found == {name: evidence.tested().get(name) for name in found}, tested_code.__doc__
