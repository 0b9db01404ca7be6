"""The trainers that the tests train fused, with the versions of their packages.

tests/trained.json lists them, and the table of trainers of README is made of it. A run of the tests with
the environment variable `FASTDPO_TRAINED`, a directory, writes there what it has trained:

    python -m tests.support.documents.trained --check DIRECTORY [--without PACKAGE[==VERSION] ...]
    python -m tests.support.documents.trained --update DIRECTORY

`--check` fails if something in tests/trained.json was not trained. `--update` adds what is missing
there, and writes the table.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

import fastdpo
from fastdpo.integrations.admission.versions import DISTRIBUTIONS, joined
from fastdpo.integrations.registry import ENTRIES, TRAINERS
from tests.support import ROOT

COMMITTED = ROOT / "tests" / "trained.json"
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- trainers:begin -->", "<!-- trainers:end -->"

Trained = dict[str, set[str]]
"""Versions by trainer."""

_elsewhere: set[tuple[str, str]] = set()


def add(trainer: str, package_version: str) -> None:
    """Records a fused training in another process, or in an environment of its own."""
    _elsewhere.add((trainer, package_version))


def distribution_of(trainer: str) -> str:
    package = trainer.partition(".")[0]
    return DISTRIBUTIONS.get(package, package)


def write(directory: Path) -> None:
    """Writes what this process has trained, and what was added."""
    here = {trainer for (trainer, kind, path), n in fastdpo.calls.items() if (kind, path) == ("policy", "fused") and n}
    found: Trained = defaultdict(set)
    for trainer, package_version in {(x, version(distribution_of(x))) for x in here if x in TRAINERS} | _elsewhere:
        found[trainer].add(package_version)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{uuid.uuid4()}.json").write_text(_text(found))


def read(*paths: Path) -> Trained:
    merged: Trained = defaultdict(set)
    for path in paths:
        for trainer, versions in json.loads(path.read_text()).items():
            merged[trainer] |= set(versions)
    return merged


def table(trained: Trained) -> str:
    """The table of trainers of README, with a row for the trainers of the same package and versions."""
    names: dict[tuple[str, str, bool, str], list[str]] = defaultdict(list)
    for trainer in TRAINERS:
        entries = [entry for entry in ENTRIES if entry.trainer == trainer]
        package, _, name = trainer.partition(".")
        ranges = ", ".join(map(_range, reversed(joined([entry.versions for entry in entries]))))
        names[package, ranges, entries[0].by_default, _listed(trained[trainer])].append(f"`{name}`")
    rows = [("package", "trainers", "trained by the tests with"), ("---",) * 3]
    for (package, ranges, by_default, tested), each in names.items():
        rows.append((f"`{package}` {ranges}", f"{'' if by_default else 'if named: '}{', '.join(each)}", tested))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _listed(versions: set[str]) -> str:
    """The versions, or how many there are if they are more than four."""
    ordered = sorted(versions, key=Version)
    return ", ".join(ordered) if len(ordered) <= 4 else f"{len(ordered)} versions, {ordered[0]} to {ordered[-1]}"


def with_table(text: str, trained: Trained) -> str:
    """The page with its table of trainers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(trained)}\n{END}{rest.split(END)[1]}"


def untrained_entries(trained: Trained) -> list[str]:
    """Trainers and versions that are supported although the tests train none of them."""
    return [
        f"{entry.trainer} {entry.versions}"
        for entry in ENTRIES
        if not any(Version(x) in SpecifierSet(entry.versions) for x in trained[entry.trainer])
    ]


def untrained(committed: Trained, found: Trained, without: Sequence[str]) -> tuple[list[str], list[str]]:
    """What was not trained although it is committed: what was left out on purpose, and the rest.

    `without` are packages, or packages with a version as in "trl==1.1.0".
    """
    left_out, missing = [], []
    for trainer, versions in committed.items():
        package = trainer.partition(".")[0]
        for x in sorted(versions - found[trainer], key=Version):
            expected = package in without or f"{package}=={x}" in without
            (left_out if expected else missing).append(f"{trainer} {x}")
    return left_out, missing


def _range(specifier: str) -> str:
    """ ">=1.15,<1.17" as "1.15 to 1.16", and "==0.9.5" as "0.9.5"."""
    if specifier.startswith("=="):
        return specifier.removeprefix("==")
    first, major, minor = re.fullmatch(r">=([\d.]+),<(\d+)\.(\d+)", specifier).groups()
    last = f"{major}.{int(minor) - 1}"
    return first if first == last else f"{first} to {last}"


def _text(trained: Trained) -> str:
    return json.dumps({x: sorted(trained[x], key=Version) for x in sorted(trained)}, indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, metavar="DIRECTORY")
    parser.add_argument("--update", type=Path, metavar="DIRECTORY")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="PACKAGE", help="packages, or versions of them, that were left out"
    )
    args = parser.parse_args()
    committed = read(COMMITTED)
    found = read(*(args.check or args.update).glob("*.json"))
    if args.check:
        left_out, missing = untrained(committed, found, args.without)
        if left_out:
            print(f"left out of this run: {', '.join(left_out)}")
        if missing:
            sys.exit(f"in {COMMITTED.name}, but not trained in this run: {', '.join(missing)}")
    else:
        for trainer, versions in found.items():
            committed[trainer] |= versions
        COMMITTED.write_text(_text(committed))
        PAGE.write_text(with_table(PAGE.read_text(), committed))


if __name__ == "__main__":
    main()
