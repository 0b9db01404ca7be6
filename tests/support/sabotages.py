"""Applies the changes of `tests/sabotages.toml` to copies of the tree, one at a time, and runs their tests.

    python -m tests.support.sabotages [NAME ...]

A change that the tests do not notice fails the command. Those whose tests need another environment run
where it is installed next to this one, and are listed as not run elsewhere.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

LIST = ROOT / "tests" / "sabotages.toml"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "out", "build", "dist", ".*_cache")
SECONDS = 600
"""The time limit of the tests of one change."""
TESTS_FAILED = 1  # pytest's exit status; errors of its command line and of collection have others


class Sabotage(NamedTuple):
    """A change of the source that tests must notice.

    Attributes:
        name: the promise or the capability that it breaks.
        file: the file that is changed, relative to the root.
        old: a piece of the file.
        new: what takes its place.
        tests: arguments of pytest.
        target: the target of make that runs these tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    target: str = "test"

    def apply(self, root: Path) -> None:
        path = root / self.file
        source = path.read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise ValueError(f"{LIST.name}: {self.name}: {self.file} must contain `old` once: {self.old}")
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")


class Outcome(NamedTuple):
    """What the tests have found.

    Attributes:
        noticed: whether they failed; None if they were not run.
        seconds: how long they took.
        detail: the first failure, or why there is none.
    """

    noticed: bool | None
    seconds: float
    detail: str


def sabotages() -> list[Sabotage]:
    """Those of the list, in its order."""
    return [Sabotage(name, **entry) for name, entry in tomllib.loads(LIST.read_text(encoding="utf-8")).items()]


def environment_of(target: str) -> tuple[Path, list[Path]]:
    """The interpreter with which make runs a target, and the folders that it puts on the path."""
    of_this = Path(sys.prefix)
    if target == "test":
        return Path(sys.executable), []
    if target.startswith("test-trl-"):
        return Path(sys.executable), [of_this / target.removeprefix("test-"), of_this / "requests"]
    return of_this.parent / f".venv-{target.removeprefix('test-')}" / "bin" / "python", []


def outcome_of(sabotage: Sabotage, root: Path = ROOT) -> Outcome:
    """Runs the tests of a sabotage on a copy of a tree that it has changed."""
    python, folders = environment_of(sabotage.target)
    if not all(path.exists() for path in (python, *folders)):
        return Outcome(None, 0.0, f"run `make {sabotage.target}` once, which installs what its tests need")
    with tempfile.TemporaryDirectory(prefix="fastdpo-sabotage-") as directory:
        copy = Path(directory) / "tree"
        shutil.copytree(root, copy, symlinks=True, ignore=NOT_COPIED)
        sabotage.apply(copy)
        options = ["--quick", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(sabotage.tests)]
        paths = os.pathsep.join(map(str, [copy, *folders]))
        started = time.perf_counter()
        process = subprocess.Popen(
            [str(python), "-m", "pytest", *options],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # to end the ranks that wait for each other as well
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Outcome(False, SECONDS, "the tests did not end: choose a change that they fail on")
        seconds = time.perf_counter() - started
    lines = output.splitlines() or [""]
    failure = next((line for line in lines if line.startswith("FAILED ")), None)
    noticed = process.returncode == TESTS_FAILED and failure is not None
    return Outcome(noticed, seconds, (failure or lines[-1]).removeprefix("FAILED ").partition(" - ")[0])


def main(names: Sequence[str]) -> int:
    known = {sabotage.name: sabotage for sabotage in sabotages()}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"sabotages: names must be among {', '.join(known)}; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    missed = []
    for name in names or known:
        outcome = outcome_of(known[name])
        shown = {True: "noticed", False: "MISSED", None: "not run"}[outcome.noticed]
        print(f"{shown:8} {outcome.seconds:5.0f} s  {name:40} {outcome.detail}", flush=True)
        missed += [name] if outcome.noticed is False else []
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
