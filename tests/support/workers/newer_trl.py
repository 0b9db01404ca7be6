"""Trainings with copies of TRL, each in a fork of this process, which has imported what TRL needs.

Usage: `python -m tests.support.workers.newer_trl COPY ...`. Each copy is a directory with the package and its
metadata. The result is saved in it.
"""

import logging
import os
import sys
import time
from pathlib import Path

import accelerate  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401
import torch
import transformers.trainer  # noqa: F401


def train_copy(copy: Path) -> None:
    """Trains DPO with a copy of TRL, as it is and patched, and saves both runs, the report and what was logged.

    The seconds are those of a second look at the trainers' code.
    """
    sys.path.insert(0, str(copy))
    import trl

    import fastdpo
    from fastdpo.integrations import evidence
    from fastdpo.integrations.patching import examine
    from tests.support.trl.dpo import tiny_model, train

    assert Path(trl.__file__).is_relative_to(copy)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("fastdpo").addHandler(handler)

    def run(name: str) -> dict:
        return vars(train(copy / name, tiny_model(seed=0), tiny_model(seed=1), evaluate=6))

    stock = run("stock")
    report = fastdpo.patch()
    patched = run("patched")
    fastdpo.unpatch()
    evidence.fingerprint.cache_clear()
    begin = time.process_time()
    examine()
    seconds = time.process_time() - begin
    result = {"stock": stock, "patched": patched, "report": str(report.seams[0]), "seconds": seconds}
    torch.save({**result, "messages": messages, "version": trl.__version__}, copy / "result.pt")


def main(*copies: Path) -> None:
    for copy in copies:
        if os.fork() == 0:
            train_copy(copy)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
