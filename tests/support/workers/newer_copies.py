"""Trainings with copies of a package, each in a fork of this process, which has imported what the package needs.

Usage: `python -m tests.support.workers.newer_copies TRAINER COPY ...`. Each copy is a directory with the package of
the trainer before it, and with the package's metadata. The result is saved in it.
"""

import gc
import logging
import os
import re
import sys
from pathlib import Path
from unittest import mock

import accelerate  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401
import torch
import transformers.trainer  # noqa: F401


def trl_dpo(directory: Path):
    from tests.support.trl.dpo import tiny_model, train

    return train(directory, tiny_model(seed=0), tiny_model(seed=1), evaluate=6)


def trl_sft(directory: Path):
    from tests.support.trl.dpo import tiny_model
    from tests.support.trl.sft import train_sft

    return train_sft(directory, tiny_model(seed=0), evaluate=6)


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
    "trl.DPOTrainer": trl_dpo,
    "trl.SFTTrainer": trl_sft,
    "llamafactory.DPOTrainer": llamafactory_dpo,
    "openrlhf.DPOTrainer": openrlhf_dpo,
    "swift.DPOTrainer": swift_dpo,
}


def train_copy(trainer: str, copy: Path) -> None:
    """Trains with a copy, as it is and patched, and saves both runs, the report and what was logged.

    Also saved are the names of the functions that were parsed.
    """
    sys.path.insert(0, str(copy))
    import fastdpo
    from fastdpo.integrations.admission import fingerprints
    from fastdpo.integrations.patching import examine

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("fastdpo").addHandler(handler)

    def run(name: str) -> dict:
        record = TRAIN[trainer](copy / name)
        steps = getattr(record, "steps", len(record.gradients))
        return dict(logs=record.logs, gradients=record.gradients, calls=record.calls, steps=steps)

    stock, parsed = run("stock"), []
    package = trainer.partition(".")[0]
    assert Path(sys.modules[package].__file__).is_relative_to(copy)
    normalized = fingerprints.normalized
    with mock.patch.object(fingerprints, "normalized", lambda source: parsed.append(source) or normalized(source)):
        (seam,) = examine(trainer).seams
        fastdpo.patch(*([trainer] if seam.on else []))
    patched = run("patched")
    result = {"stock": stock, "patched": patched, "report": str(seam), "messages": messages}
    result["parsed"] = [re.search(r"def (\w+)", source)[1] for source in parsed]
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
