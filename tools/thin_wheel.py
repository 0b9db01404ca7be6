"""Removes files from a wheel, such as libraries for other devices.

Usage: `python tools/thin_wheel.py WHEEL PATTERN`. PATTERN is a regular expression that their names match.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from zipfile import ZipFile


def thin(wheel: Path, pattern: str) -> None:
    """Leaves the record of the wheel as it is: pip installs what is there."""
    part = wheel.with_suffix(".part")
    with ZipFile(wheel) as whole, ZipFile(part, "w") as kept:
        for file in whole.infolist():
            if not re.search(pattern, file.filename):
                kept.writestr(file, whole.read(file))
    part.replace(wheel)


if __name__ == "__main__":
    thin(Path(sys.argv[1]), sys.argv[2])
