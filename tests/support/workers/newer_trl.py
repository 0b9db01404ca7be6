"""Trainings with copies of TRL, each in a fork of this process, which has imported what TRL needs.

Usage: `python -m tests.support.workers.newer_trl COPY ...`. Each copy is a directory with the package and its
metadata. The result is saved in it.
"""

import contextlib
import logging
import os
import re
import sys
import timeit
from pathlib import Path
from unittest import mock

import accelerate  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401
import torch
import transformers.trainer  # noqa: F401


def train_copy(copy: Path) -> None:
    """Trains DPO with a copy of TRL, as it is and patched, and saves both runs, the report and what was logged.

    Also saved are the names of the functions that were parsed, and the seconds that a look at the code of the
    preference trainers takes, the best of five.
    """
    sys.path.insert(0, str(copy))
    import trl

    import fastdpo
    from fastdpo.integrations import evidence, fingerprints
    from tests.support.trl.dpo import tiny_model, train

    assert Path(trl.__file__).is_relative_to(copy)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("fastdpo").addHandler(handler)

    def run(name: str) -> dict:
        return vars(train(copy / name, tiny_model(seed=0), tiny_model(seed=1), evaluate=6))

    stock, parsed = run("stock"), []
    normalized = fingerprints.normalized
    with mock.patch.object(fingerprints, "normalized", lambda source: parsed.append(source) or normalized(source)):
        report = fastdpo.patch()
    patched = run("patched")
    fastdpo.unpatch()
    functions = noted()
    seconds = min(timeit.repeat(lambda: evidence.changed(functions, "trl"), fingerprints.forget, number=1, repeat=5))
    result = {"stock": stock, "patched": patched, "report": str(report.seams[0]), "seconds": seconds}
    result["parsed"] = [re.search(r"def (\w+)", source)[1] for source in parsed]
    torch.save({**result, "messages": messages, "version": trl.__version__}, copy / "result.pt")


def noted() -> dict:
    """The functions that the lines of TRL's preference trainers rely on, if they can be imported."""
    from fastdpo.integrations import evidence
    from fastdpo.integrations.lines import LINES

    with evidence.noting() as functions:
        for line in LINES:
            if line.by_default and line.compared:
                with contextlib.suppress(ImportError, RuntimeError):
                    line.load().unsupported_reason()
    return functions


def main(*copies: Path) -> None:
    for copy in copies:
        if os.fork() == 0:
            train_copy(copy)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
