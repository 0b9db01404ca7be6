"""Records the functions that trainer lines rely on, in the newest versions that are tested.

    python -m tests.support.documents.tested_code

writes fastdpo/integrations/tested_code.json from the packages that are installed.
"""

from __future__ import annotations

import importlib
import json

from fastdpo.integrations import evidence
from fastdpo.integrations.lines import LINES, installed_version


def found() -> dict[str, str | None]:
    """The fingerprints of the functions of installed packages, by their names."""
    fingerprints = {}
    for line in LINES:
        newest = next(x for x in LINES if x.trainer == line.trainer)
        version = installed_version(line.package)
        if line is newest and version is not None and line.supports(version):
            with evidence.noting() as functions:
                assert importlib.import_module(f"fastdpo.integrations.{line.module}").unsupported_reason() is None
            own = {name: x for name, x in functions.items() if name.partition(".")[0] == line.package}
            fingerprints |= {name: evidence.fingerprint(function) for name, function in own.items()}
    return fingerprints


if __name__ == "__main__":
    evidence.TESTED.write_text(json.dumps(dict(sorted({**evidence.tested(), **found()}.items())), indent=2) + "\n")
