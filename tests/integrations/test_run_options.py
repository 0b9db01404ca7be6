"""Options of `fastdpo run` and of a program's own `patch()`, whichever of them comes first.

The command patches a trainer when the program imports it. Here, `patch_for_run` stands for that.
"""

import pytest
from trl import DPOTrainer

import fastdpo
from fastdpo.integrations import patching
from fastdpo.integrations.trl.dpo import DPOLine
from tests.support.trl.dpo import build, tiny_model

DPO, KTO = "trl.DPOTrainer", "trl.KTOTrainer"
NOTHING = {}


@pytest.fixture(params=["imported before patch()", "imported by patch()"])
def start(request, monkeypatch):
    """Starts a program by `fastdpo run` with options: its trainer is imported at once, or by `patch()`."""

    def start(**options):
        if request.param == "imported before patch()":
            patching.patch_for_run(DPO, options)
            return
        examine = DPOLine.unsupported_reason

        def importing(line):
            monkeypatch.undo()
            patching.patch_for_run(DPO, options)
            return examine(line)

        monkeypatch.setattr(DPOLine, "unsupported_reason", importing)

    return start


def options() -> dict:
    """The options that DPOTrainer is patched with, without those that are defaults."""
    default = patching.PatchOptions()
    now = vars(patching.options_of(DPO))
    return {name: value for name, value in now.items() if value != getattr(default, name)}


@pytest.mark.parametrize("targets", [(), (DPO,), ("trl",), (DPOTrainer,)], ids=str)
@pytest.mark.parametrize(
    ("command", "program", "both"),
    [
        (NOTHING, NOTHING, NOTHING),
        (NOTHING, dict(verify=True), dict(verify=True)),
        (dict(max_tokens=500), NOTHING, dict(max_tokens=500)),
        (dict(max_tokens=500), dict(verify=True), dict(max_tokens=500, verify=True)),
        (dict(max_tokens=500), dict(max_tokens=500), dict(max_tokens=500)),
        (
            dict(share_prompts=False),
            dict(share_prompts=False, memory_budget=9),
            dict(share_prompts=False, memory_budget=9),
        ),
    ],
    ids=["none", "program", "command", "different ones", "the same", "one more"],
)
def test_options_are_added_up(start, targets, command, program, both):
    start(**command)
    assert fastdpo.patch(*targets, **program).seams[0].on
    assert options() == both
    fastdpo.patch(DPO)  # changes nothing
    assert options() == both


@pytest.mark.parametrize(
    ("command", "program", "had", "got"),
    [
        (dict(max_tokens=500), dict(max_tokens=300), "max_tokens=500", "max_tokens=300"),
        (dict(verify=True, max_tokens=5), dict(verify=False, max_tokens=5), "verify=True", "verify=False"),
        (dict(share_prompts=False), dict(share_prompts=True, verify=True), "share_prompts=False", "share_prompts=True"),
    ],
)
def test_an_option_that_both_give_must_be_the_same(start, command, program, had, got):
    start(**command)
    with pytest.raises(fastdpo.PatchError) as caught:
        fastdpo.patch(**program)
    assert str(caught.value) == (
        f"patch: options must be those that trl.DPOTrainer is patched with, {had} by `fastdpo run`; got {got}. "
        "Give an option once, or call fastdpo.unpatch() first"
    )
    assert options() == command


def test_a_second_call_of_the_program_cannot_change_options(start):
    start(max_tokens=500)
    fastdpo.patch(verify=True)
    with pytest.raises(
        fastdpo.PatchError, match=r"patched with, memory_budget=None by an earlier call of patch\(\); got"
    ):
        fastdpo.patch(DPO, memory_budget=0)
    with pytest.raises(
        fastdpo.PatchError, match=r"with, verify=True by an earlier call of patch\(\), max_tokens=500 by `f"
    ):
        fastdpo.patch(DPO, verify=False, max_tokens=6)
    fastdpo.unpatch()
    fastdpo.patch(DPO, memory_budget=0)
    assert options() == dict(memory_budget=0)


def test_other_trainers_have_the_options_of_the_program_alone(start):
    start(verify=True)
    fastdpo.patch(memory_budget=9)
    assert options() == dict(verify=True, memory_budget=9)
    assert patching.options_of(KTO) == patching.PatchOptions(memory_budget=9)


def test_a_block_leaves_what_the_command_has_patched(start):
    start(max_tokens=500)
    with fastdpo.patched(DPO, KTO, verify=True):
        assert options() == dict(max_tokens=500, verify=True)
    assert options() == dict(max_tokens=500)
    assert patching.options_of(KTO) is None


def test_options_come_before_trainers(tmp_path):
    patching.patch_for_run(DPO, NOTHING)
    trainer = build(tmp_path, tiny_model(), tiny_model(seed=1))
    with pytest.raises(
        fastdpo.PatchError, match=r"verify must be given before a trainer is created under `fastdpo run`"
    ):
        fastdpo.patch(verify=True)
    assert options() == NOTHING
    del trainer
    fastdpo.patch(verify=True)
    assert options() == dict(verify=True)


def test_a_call_without_options_keeps_those_of_an_earlier_one():
    fastdpo.patch(DPO, memory_budget=9)
    fastdpo.patch()
    assert options() == dict(memory_budget=9)
    assert patching.options_of(KTO) == patching.PatchOptions()
