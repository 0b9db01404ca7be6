"""Records the newest versions of packages that `make test` has passed with.

    python -m tests.support.documents.newest

writes those that are installed to tests/newest.json, as `make test-newest` does when all tests have passed. The page
docs/support.md has them.
"""

from __future__ import annotations

import json
from importlib.metadata import version

from tests.support import ROOT

PATH = ROOT / "tests" / "newest.json"
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets")


def sentence() -> str:
    """The versions in words."""
    recorded = json.loads(PATH.read_text())
    *most, last = (f"{name} {recorded[name].partition('+')[0]}" for name in PACKAGES)
    return f"{', '.join(most)} and {last}"


if __name__ == "__main__":
    PATH.write_text(json.dumps({name: version(name) for name in PACKAGES}, indent=2) + "\n")
