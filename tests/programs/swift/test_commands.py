"""The command `swift rlhf`, as it is and by `fastdpo run`. It trains in a process that it starts."""

import pytest

from tests.support.programs.harness import assert_same, on, said
from tests.support.programs.swift_runs import LORA, arguments
from tests.support.programs.workload import TINY


def command(output, workload, kind, **options):
    reference = options.pop("reference", kind in ("dpo", "kto"))
    return ["swift", "rlhf", *arguments(output, workload, kind, reference=reference, **options)]


# kind: (trainer, number of calls of each kind per step)
KINDS = {
    "dpo": ("swift.DPOTrainer", dict(policy=1, reference=1)),
    "cpo": ("swift.CPOTrainer", dict(policy=1)),
    "simpo": ("swift.CPOTrainer", dict(policy=1)),
    "orpo": ("swift.ORPOTrainer", dict(policy=1)),
    "kto": ("swift.KTOTrainer", dict(policy=2, reference=1)),
    "rm": ("swift.RewardTrainer", dict(policy=1)),
}
IMPORTED = {"dpo": ["trl.DPOTrainer"], "rm": ["trl.RewardTrainer"]}
"""The trainers of TRL that ms-swift imports, since its own are subclasses of them."""
OTHER_MEANS = ("logits/chosen", "logits/rejected")
"""Without a reference, ms-swift averages them over prompts and padding, too."""


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.thorough] * (x in ("dpo", "simpo"))) for x in KINDS]
)
def test_the_command_trains_fused_with_the_same_numbers(kind, options, workload, train_both, record):
    trainer, calls = KINDS[kind]
    stock, fused = train_both(
        lambda output: command(output, workload, kind, **({**options, "reference": False} if options else {}))
    )
    if kind in ("cpo", "simpo", "orpo"):
        for log in (*stock.logs, *fused.logs):
            for name in OTHER_MEANS:
                log.pop(name, None)
    assert_same(stock, fused)
    assert fused.calls == {(trainer, role, "fused"): n * workload.steps for role, n in calls.items()}
    assert said(fused.stderr) == on(*IMPORTED.get(kind, ()), trainer)
    tuner = " --tuner_type lora" if options else ""
    record("ms-swift", "ms-swift", f"swift rlhf --rlhf_type {kind}{tuner}", stock, fused)


def test_the_workers_of_torchrun_are_patched(train_both):
    """In a quick run, the only training with the loss of DPO."""
    stock, fused = train_both(lambda output: command(output, TINY, "dpo"), NPROC_PER_NODE="1")
    assert_same(stock, fused)
    assert fused.calls == {("swift.DPOTrainer", role, "fused"): TINY.steps for role in ("policy", "reference")}
    assert said(fused.stderr) == on("trl.DPOTrainer", "swift.DPOTrainer")
