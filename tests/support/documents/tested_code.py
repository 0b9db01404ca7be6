"""Records the code that trainer lines rely on, in the newest versions that are tested.

    python -m tests.support.documents.tested_code

writes fastdpo/integrations/admission/tested_code.json from the packages that are installed. In that of OpenRLHF,
tests/openrlhf/stand_ins is on the path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from fastdpo.integrations.admission import packages, tested_code
from fastdpo.integrations.admission.versions import installed_version
from fastdpo.integrations.line import TrainerLine
from fastdpo.integrations.registry import ENTRIES


def newest_lines() -> Iterator[TrainerLine]:
    """The newest line of each trainer whose package is installed, in a version that is older than none of them."""
    newest = [entry for entry in ENTRIES if entry is next(x for x in ENTRIES if x.trainer == entry.trainer)]
    for package in dict.fromkeys(entry.package for entry in newest):
        version, entries = installed_version(package), [x for x in newest if x.package == package]
        if version is not None and all(x.supports(version) or x.precedes(version) for x in entries):
            yield from (x.load() for x in entries)


def relied_on(line: TrainerLine) -> dict[str, Any]:
    """All functions that a line relies on, by their full names."""
    options = [*line.options_rely_on.values(), () if line.cutting is None else line.cutting.relies_on]
    return tested_code.code_relied_on(line) | tested_code.code_of(line, chain.from_iterable(options))


def found() -> dict[str, str | None]:
    """The hashes of the functions that lines rely on, by their names, of packages in their newest tested versions."""
    tested = {name for name, x in packages.TESTED.items() if installed_version(name) == x}
    hashes = {}
    for line in newest_lines():
        recorded = tested if line.is_newer else {*tested, line.package}
        functions = relied_on(line).items()
        hashes |= {name: tested_code.hash_of(x) for name, x in functions if name.partition(".")[0] in recorded}
    return hashes


def main() -> None:
    hashes = found()
    replaced = {name.partition(".")[0] for name in hashes}
    if "trl" not in replaced:  # whose lines rely on all that is recorded of the packages below trainers
        replaced -= packages.TESTED.keys()
    kept = {name: x for name, x in tested_code.hashes().items() if name.partition(".")[0] not in replaced}
    tested_code.PATH.write_text(json.dumps(kept | hashes, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
