"""Versions of TRL that are newer than the tested ones: on, with their first calls compared with stock ones.

Copies of the installed TRL have the version 1.17.0, and some of them other code.
"""

import re

import pytest
from transformers import Trainer
from trl import GRPOTrainer, SFTTrainer

import fastdpo
from fastdpo.commands import doctor
from fastdpo.integrations import patching
from fastdpo.integrations.patching import examine
from fastdpo.integrations.registry import CUT_BY_MAX_TOKENS, ENTRIES
from fastdpo.models import calls as counters
from tests.support.comparison import double
from tests.support.copies import (
    Copy,
    assert_changes_are_noticed,
    assert_recorded,
    assert_reported_and_trained,
    change,
    set_newer,
    train_copies,
)
from tests.support.trl.dpo import assert_same, assert_same_bits
from tests.support.workers.trainings import TRAIN, model_of

DPO, UTILS, KERNEL = "trainer/dpo_trainer.py", "trainer/utils.py", "kernels/chunked_logprob.py"
TOKENS = '        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]\n'
METRIC = '        self._metrics[mode]["one"].append(self.accelerator.gather(0 * loss).max().item() + 1)\n'
ARGUMENT = '        peft_config: "PeftConfig | None" = None,\n'
AUXILIARY = "        if self.aux_loss_enabled:\n            aux_loss = outputs"
SFT, KTO, REWARD, GRPO, RLOO = (f"trainer/{x}_trainer.py" for x in ("sft", "kto", "reward", "grpo", "rloo"))
LOSS = "def _compute_loss(self, model, inputs, return_outputs)"
LOSS_OF_PAIRS = "def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None)"
LOSS_OF_GROUPS = "def _compute_loss(self, model, inputs)"
FUNCTION_ARGUMENT = "        formatting_func: Callable[[dict], str] | None = None,\n"
OUTPUTS = '    outputs: tuple[str, ...] = ("log_probs",),\n'
AUX_LOSS_FIELD = "    aux_loss: torch.Tensor | None = None\n"
LABEL_MASK = "            label_mask=mask,\n"
COPIES = {  # by the name of a copy: file, text, replacement
    "unchanged": [],
    "grown": [
        (DPO, ARGUMENT, f"{ARGUMENT}        more: bool = False,\n"),
        (DPO, TOKENS, TOKENS + METRIC),
        *((file, LOSS, LOSS.replace(")", ", scale=1)")) for file in (DPO, KTO)),
        (KTO, "losses.nanmean()", "1.5 * losses.nanmean()"),
        (REWARD, LOSS_OF_PAIRS, LOSS_OF_PAIRS.replace(")", ", scale=1)")),
        (REWARD, "rewards_chosen", "chosen_rewards"),
        (GRPO, LOSS_OF_GROUPS, LOSS_OF_GROUPS.replace(")", ", scale=1)")),
        (GRPO, "per_token_loss", "token_losses"),
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
    "another name": [(file, "add_fused_lm_head", "attach_lm_head") for file in (DPO, KTO, SFT, GRPO, RLOO, UTILS)],
    "other positions": [(UTILS, "labels = labels[:, 1:]", "labels = labels[:, :-1]")],
    "another kernel": [(KERNEL, "logprobs = target_logit - log_z\n", "logprobs = 1.25 * (target_logit - log_z)\n")],
}

GROWN = [f"trl.{x}Trainer" for x in ("SFT", "Reward", "KTO", "GRPO")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of `train_copies` by the names of the copies."""
    copies = {name: Copy("trl.DPOTrainer", changes) for name, changes in COPIES.items()}
    copies |= {name: Copy(name, COPIES["grown"]) for name in GROWN}
    return train_copies("1.17.0", copies, tmp_path_factory.mktemp("copies"))


OFF = (
    "off, its code differs from the tested versions: trl.trainer.dpo_trainer.add_fused_lm_head must have the "
    "parameters ['model', 'temperature', 'cast_lm_head_to_fp32', 'outputs']; got None [different-code]"
)
DIFFERENT = {
    "other positions": "log-prob.* by",
    "another kernel": "log-prob.* by",
    "another output": r"z_loss: fastdpo has computed None, stock \[",
    "another scale": "loss.* by",
}
"""What differs in the first calls of the copies that are left to stock."""


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_what_its_stock_trains(results, name):
    result = results[name]
    stock, patched = result["stock"], result["patched"]
    assert result["report"] == f"trl.DPOTrainer (1.17.0): {OFF if name == 'another name' else 'on'}"
    if name in ("unchanged", "grown", "another loss"):
        assert patched.calls.keys() == {(kind, "fused") for kind in ("policy", "reference", "eval")}
        assert_same(stock, patched)
    else:
        assert all(path == "stock" for _, path in patched.calls)
        assert_same_bits(stock, patched)
    if name == "grown":
        assert all(log["one"] == 1.0 for log in patched.logs if "loss" in log)


@pytest.mark.parametrize("trainer", GROWN)
def test_other_trainers_of_a_copy_that_has_grown(results, trainer):
    assert_reported_and_trained(results[trainer], f"{trainer} (1.17.0): on")
    assert not any("not fused" in message for message in results[trainer]["messages"])


def test_a_difference_is_logged_with_its_size(results):
    newer = r"trl 1\.17\.0 is newer than the tested versions, and its first call differs .* in .*{}"
    for name, different in DIFFERENT.items():
        assert any(
            re.search(rf"\(policy\): not fused, {newer}".format(different), message)
            for message in results[name]["messages"]
        )
    for name in ("unchanged", "grown", "another loss"):
        assert not any("not fused" in message for message in results[name]["messages"])


def test_the_recorded_code_is_that_of_the_installed_versions():
    assert_recorded()


@pytest.fixture
def newer(monkeypatch):
    """TRL as it is, in a newer version."""
    set_newer(monkeypatch, "trl")


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("trainer", TRAIN)
def test_trainers_of_a_newer_version_are_compared(trainer, tmp_path):
    def run(name, cast=lambda model: model):
        return TRAIN[trainer](tmp_path / name, *(cast(model_of(trainer, seed)) for seed in range(2)), evaluate=6)

    stock = run("stock")
    stock.in_float64 = lambda: run("float64", double)
    with fastdpo.patched(trainer) as report:
        assert report.seams[0].newer
        patched = run("patched")
    assert {path for _, path in patched.calls} == {"fused"}
    assert counters.outcomes[trainer, "verified"] >= 2
    if trainer not in ("trl.CPOTrainer", "trl.ORPOTrainer"):  # other means of logits
        assert_same(stock, patched)


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(
    "trainer", ["trl.OnlineDPOTrainer", "trl.CPOTrainer", "trl.ORPOTrainer", "trl.TPOTrainer", "trl.A2POTrainer"]
)
def test_a_changed_function_that_is_replaced_is_a_reason(monkeypatch, trainer):
    assert examine(trainer).seams[0].on
    change(monkeypatch, "_forward", "concatenated_forward", "_compute_loss", "_get_sequence_logps")
    (seam,) = examine(trainer).seams
    assert not seam.on
    assert seam.reason.name == "changed-code"


HELPED = {"CPO": "selective_log_softmax", "A2PO": "selective_log_softmax", "TPO": "selective_log_softmax_and_entropy"}


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("trainer", HELPED)
def test_a_changed_helper_of_a_function_that_is_replaced_is_a_reason(monkeypatch, trainer):
    assert examine(f"trl.{trainer}Trainer").seams[0].on
    change(monkeypatch, HELPED[trainer])
    (seam,) = examine(f"trl.{trainer}Trainer").seams
    assert seam.reason.name == "changed-code"
    assert f"trl.trainer.utils.{HELPED[trainer]}" in seam.reason


@pytest.mark.parametrize("trainer", CUT_BY_MAX_TOKENS)
def test_each_change_of_a_function_that_an_option_relies_on_is_noticed(monkeypatch, trainer):
    assert_changes_are_noticed(monkeypatch, trainer, "max_tokens")


OTHERS = {  # the trainer, and how a newer version differs
    "another cadence of generations": ("GRPO", lambda patch: patch.delattr(GRPOTrainer, "_prepare_inputs")),
    "a function is missing": ("KTO", lambda patch: patch.delattr(Trainer, "_run_epoch")),
    "a function is overridden": (
        "SFT",
        lambda patch: patch.setattr(SFTTrainer, "get_batch_samples", lambda *args: None, raising=False),
    ),
}


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("case", OTHERS)
def test_another_function_that_an_option_relies_on_is_a_reason(monkeypatch, caplog, case):
    trainer, differ = OTHERS[case]
    set_newer(monkeypatch, "transformers")
    differ(monkeypatch)
    assert fastdpo.patch(f"trl.{trainer}Trainer", max_tokens=500).seams[0].newer
    assert re.search(r"keeps the batches of TRL, .*\.\w+, on which max_tokens relies", caplog.text)


VERSIONS = {  # of a line, those that it precedes and others
    ">=1.15,<1.17": (["1.17.0", "1.17", "1.17.0rc1", "1.17.0.dev0", "2.0"], ["1.16.0", "0.20"]),
    "==0.9.5": (["0.9.5.post1", "0.9.6.dev0"], ["0.9.4", "0.9.5"]),
}


@pytest.mark.parametrize("versions", VERSIONS)
def test_versions_that_are_newer_than_those_of_an_entry(versions):
    """From their first pre-release on."""
    entry, (newer, others) = next(entry for entry in ENTRIES if entry.versions == versions), VERSIONS[versions]
    assert [version for version in (*newer, *others) if entry.precedes(version)] == newer


COMPARED = "Nothing is to be done: calls of each model are compared with stock ones"


@pytest.mark.usefixtures("newer")
def test_a_process_says_once_that_versions_are_newer(monkeypatch):
    monkeypatch.setattr(patching, "noted", set())
    note = fastdpo.patch().note
    assert note.startswith("provisionally, newer than tested: ")
    assert "trl 99.0" in note
    assert note.endswith(COMPARED)
    fastdpo.unpatch()
    assert str(fastdpo.patch("trl.DPOTrainer")) == "fastdpo: trl.DPOTrainer (99.0): on"
    set_newer(monkeypatch, "transformers")
    assert "transformers 99.0" in fastdpo.patch("trl.KTOTrainer").note


def test_the_doctor_says_why_a_version_is_provisional(monkeypatch, newer):
    def trainers():
        return {finding.name: finding for finding in doctor.examine(["trl.DPOTrainer", "trl.ORPOTrainer"])["trainers"]}

    (trl,) = (finding for finding in doctor.package_findings() if finding.name == "trl")
    assert trl.detail.startswith("99.0: provisionally, newer than the tested versions")
    assert trainers()["trl.DPOTrainer"] == doctor.Finding(doctor.OK, "trl.DPOTrainer", "99.0")
    change(monkeypatch, "concatenated_forward")
    assert trainers()["trl.DPOTrainer"].status == doctor.OK
    assert trainers()["trl.ORPOTrainer"].status == doctor.FAILED
    assert "[changed-code]" in trainers()["trl.ORPOTrainer"].detail
