"""Options of `fastdpo run` and of a program's own `patch()`, whichever of them comes first.

The command patches a trainer when the program imports it. Here, a call of `patch` stands for that.
"""

import pytest
from trl import DPOTrainer

import fastdpo
from fastdpo.integrations.patching import options_of
from fastdpo.integrations.trl.dpo import DPOLine

DPO, KTO = "trl.DPOTrainer", "trl.KTOTrainer"


@pytest.fixture(params=["imported before patch()", "imported by patch()"])
def start(request, monkeypatch):
    """Starts a program by `fastdpo run` with options: its trainer is imported at once, or by `patch()`."""

    def start(**options):
        if request.param == "imported before patch()":
            fastdpo.patch(DPO, **options)
            return
        examine = DPOLine.unsupported_reason

        def importing(line):
            monkeypatch.undo()
            fastdpo.patch(DPO, **options)
            return examine(line)

        monkeypatch.setattr(DPOLine, "unsupported_reason", importing)

    return start


@pytest.mark.parametrize("targets", [(), (DPO,), ("trl",), (DPOTrainer,)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(max_tokens=500, verify=True)], ids=str)
def test_a_program_may_give_the_options_of_the_command(start, targets, options):
    start(**options)
    assert fastdpo.patch(*targets, **options).seams[0].on
    assert options_of(DPO).given() == options


@pytest.mark.parametrize("enter", [fastdpo.patch, lambda *args, **kwargs: fastdpo.patched(*args, **kwargs).__enter__()])
@pytest.mark.parametrize(
    ("command", "program", "had", "got"),
    [
        (dict(max_tokens=500, verify=True), {}, "max_tokens=500, verify=True", "max_tokens='own', verify=False"),
        (dict(max_tokens=500), dict(max_tokens=300), "max_tokens=500", "max_tokens=300"),
        ({}, dict(share_prompts=False), "share_prompts=True", "share_prompts=False"),
    ],
)
def test_others_are_an_error(start, enter, command, program, had, got):
    start(**command)
    with pytest.raises(fastdpo.PatchError) as caught:
        enter(KTO, DPO, **program)
    assert str(caught.value) == (
        f"patch: options must be those that trl.DPOTrainer is patched with, {had}; got {got}. "
        "Give the same options to each call and to `fastdpo run`, or call fastdpo.unpatch() first"
    )
    assert options_of(DPO).given() == command
    assert options_of(KTO) is None
    fastdpo.unpatch()
    fastdpo.patch(DPO, **program)
    assert options_of(DPO).given() == program


def test_a_block_leaves_what_the_command_has_patched(start):
    start(max_tokens=500)
    with fastdpo.patched(DPO, KTO, max_tokens=500):
        assert options_of(KTO).max_tokens == 500
    assert options_of(DPO).max_tokens == 500
    assert options_of(KTO) is None
