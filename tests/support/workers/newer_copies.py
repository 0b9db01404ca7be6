"""Trainings with copies of a package, each in a fork of this process, which has imported what the package needs.

Usage: `python -m tests.support.workers.newer_copies TRAINER COPY ...`. Each copy is a directory with the package of
the trainer before it, and with the package's metadata. The result is saved in it.
"""

import gc
import logging
import os
import sys
from functools import partial
from pathlib import Path

import accelerate  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401
import torch
import transformers.trainer  # noqa: F401


def trl(name: str, directory: Path):
    from tests.support.workers.trainings import TRAIN, model_of

    return TRAIN[name](directory, model_of(name, 0), model_of(name, 1), evaluate=6)


def llamafactory_dpo(directory: Path):
    from llamafactory_runs import checkpoint, train

    directory.mkdir()
    return train(directory, checkpoint(directory), evaluate=True)


def openrlhf_dpo(directory: Path):
    from openrlhf_runs import Strategy, checkpoint, train

    directory.mkdir()
    return train(*(checkpoint(directory, seed=seed) for seed in range(2)), Strategy(), evaluate=6)


def swift_dpo(directory: Path):
    from tests.support.programs.swift_runs import train

    return train(directory)


TRAIN = {
    **{name: partial(trl, name) for name in (f"trl.{x}Trainer" for x in ("DPO", "Reward", "KTO", "SFT", "GRPO"))},
    "llamafactory.DPOTrainer": llamafactory_dpo,
    "openrlhf.DPOTrainer": openrlhf_dpo,
    "swift.DPOTrainer": swift_dpo,
}


def train_copy(trainer: str, copy: Path) -> None:
    """Trains with a copy, as it is and patched, and saves both runs, the report and what was logged."""
    sys.path.insert(0, str(copy))
    import fastdpo
    from fastdpo.integrations.patching import examine
    from tests.support.recorded_messages import recorded_messages

    messages = recorded_messages()

    def run(name: str) -> dict:
        record = TRAIN[trainer](copy / name)
        steps = getattr(record, "steps", len(record.gradients))
        return dict(logs=record.logs, gradients=record.gradients, calls=record.calls, steps=steps)

    stock = run("stock")
    package = trainer.partition(".")[0]
    assert Path(sys.modules[package].__file__).is_relative_to(copy)
    (seam,) = examine(trainer).seams
    fastdpo.patch(*([trainer] if seam.on else []))
    patched = run("patched")
    result = {"stock": stock, "patched": patched, "report": str(seam), "messages": messages}
    torch.save(result, copy / "result.pt")


def main(*arguments: str) -> None:
    gc.freeze()  # trainings collect garbage, which takes long among all that is imported
    for trainer, copy in zip(arguments[::2], arguments[1::2], strict=True):
        if os.fork() == 0:
            try:
                train_copy(trainer, Path(copy))
            except BaseException:
                logging.exception("%s", copy)
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, copy


if __name__ == "__main__":
    main(*sys.argv[1:])
