"""Checks that wheels install together on a machine: each requirement is met by another wheel, or by what is there.

Usage: `python tools/check_wheels.py WHEELS THERE`, or `make gpu-wheels`. WHEELS is a directory; THERE is a file of
packages, one a line, with their versions or, where any one will do, without. Prints the size of each wheel. The exit
code is 1 if a requirement is not met.
"""

from __future__ import annotations

import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MACHINE = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}
MACHINE |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython"}
MACHINE |= {"platform_python_implementation": "CPython", "os_name": "posix"}


def unmet(wheels: Path, there: Path) -> list[str]:
    """The requirements of the wheels in a directory that nothing meets, each with the wheel that has it."""
    pins = [Requirement(line) for line in there.read_text().splitlines() if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    needs: dict[str, list[Requirement]] = {}
    for path in sorted(wheels.glob("*.whl")):
        with ZipFile(path) as wheel:
            (name,) = (x for x in wheel.namelist() if x.count("/") == 1 and x.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(wheel.read(name).decode())
        versions[canonicalize_name(metadata["Name"])] = metadata["Version"]
        needs[canonicalize_name(metadata["Name"])] = [*map(Requirement, metadata.get_all("Requires-Dist") or [])]
    missing = []
    for name, requirements in needs.items():
        for need in requirements:
            if need.marker is not None and not need.marker.evaluate(MACHINE | {"extra": ""}):
                continue
            found = versions.get(canonicalize_name(need.name))
            if found is None or (found and not need.specifier.contains(found, prereleases=True)):
                missing.append(f"{name} requires {need}; {'it is missing' if found is None else f'there is {found}'}")
    return missing


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    for path in sorted(directory.iterdir(), key=lambda path: -path.stat().st_size):
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path.name}")
    print(f"{sum(path.stat().st_size for path in directory.iterdir()) / 1e6:8.1f} MB")
    missing = unmet(directory, Path(sys.argv[2]))
    print("\n".join(missing), file=sys.stderr)
    sys.exit(bool(missing))
