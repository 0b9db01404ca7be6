"""Records the newest versions of packages that tests have passed with.

    python -m tests.support.documents.newest [TESTS]

writes those that are installed, and which tests have passed, to tests/newest.json. `make test-newest` does so when all
tests have passed. The page docs/support.md has them.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from tests.support import ROOT

PATH = ROOT / "tests" / "newest.json"
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets")


def sentence() -> str:
    """Which tests have passed with which versions, in words."""
    recorded = json.loads(PATH.read_text())
    *most, last = (f"{name} {recorded[name].partition('+')[0]}" for name in PACKAGES)
    return f"{recorded['tests']} with {', '.join(most)} and {last}"


if __name__ == "__main__":
    recorded = {"tests": " ".join(sys.argv[1:]) or "all of `make test`", **{name: version(name) for name in PACKAGES}}
    PATH.write_text(json.dumps(recorded, indent=2) + "\n")
