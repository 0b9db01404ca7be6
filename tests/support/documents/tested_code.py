"""Records the functions that trainer lines rely on, in the newest versions that are tested.

    python -m tests.support.documents.tested_code

writes fastdpo/integrations/admission/tested_code.json from the packages that are installed. In that of OpenRLHF,
tests/openrlhf/stand_ins is on the path.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from types import FunctionType
from typing import Any

from fastdpo.integrations.admission import evidence, fingerprints, packages
from fastdpo.integrations.admission.versions import installed_version
from fastdpo.integrations.lines import LINES, Line
from fastdpo.integrations.options import specific_options


def found() -> dict[str, list[str]]:
    """The hashes of what lines rely on in installed packages, by the names of functions and constants."""
    hashes = {}
    for package, relied_on in packages.PACKAGES.items():
        if installed_version(package) == relied_on.tested:
            hashes |= {name: hashes_of(name, x) for name, x in packages.functions_of(package).items()}
    for line in LINES:
        newest = next(x for x in LINES if x.trainer == line.trainer)
        version = installed_version(line.package)
        if line is newest and version is not None and line.supports(version):
            with evidence.noting() as functions:
                assert line.load().unsupported_reason() is None
            for name, function in functions.items():
                if fingerprints.package_of(name) == line.package:
                    reach = fingerprints.reached(fingerprints.inner(function))
                    hashes |= {each: hashes_of(each, value) for each, value in reach.items()}
            tested = [line.package, *(x for x, y in packages.PACKAGES.items() if installed_version(x) == y.tested)]
            hashes |= {name: hashes_of(name, x) for name, x in functions_of_options(line, tested).items()}
    return hashes


def functions_of_options(line: Line, of_packages: Collection[str]) -> dict[str, Any]:
    """The functions of some packages that options of a trainer rely on, by their names."""
    functions = (x for option in specific_options(line.trainer) for x in line.load().relied_on(option))
    return {fingerprints.name_of(x): x for _, package, x in functions if package in of_packages and x is not None}


def hashes_of(name: str, value: object) -> list[str]:
    """What is recorded of a function or a constant: the hash of what it does, and that of its text."""
    if not isinstance(value, FunctionType):
        return [fingerprints.text_hash(value)]
    code = fingerprints.code_hash(value)
    assert code is not None, name
    return [code, fingerprints.text_hash(value)]


if __name__ == "__main__":
    package = {fingerprints.package_of(name) for name in found()}
    kept = {name: x for name, x in evidence.tested().items() if fingerprints.package_of(name) not in package}
    lines = [f"  {json.dumps(name)}: {json.dumps(hashes)}" for name, hashes in sorted({**kept, **found()}.items())]
    evidence.TESTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
