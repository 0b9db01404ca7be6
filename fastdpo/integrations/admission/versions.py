"""Which version of a package is installed, which one of a trainer's package to install instead, and which installed
packages forbid it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from contextlib import suppress

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from ...reasons import Reason

DISTRIBUTIONS = {"swift": "ms-swift"}
"""The distributions of packages, where the names differ."""


def installed_version(package: str) -> str | None:
    """The version of the distribution of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def unsupported_version_reason(package: str, version: str, supported: list[str]) -> Reason:
    """Returns why an installed version is not supported, with the versions to install instead.

    If an installed distribution requires the version that is there and cannot run with the newest
    supported versions, the reason names it and advises nothing.

    Args:
        package: such as "trl".
        version: the installed one, which is not supported.
        supported: specifiers of supported versions, newest first.
    """
    requirements = _requirements_on(package, version)
    for distribution, specifier in requirements:
        if not _overlap(specifier, supported[0]):
            return Reason("required-version", distribution=distribution, requirement=f"{package}{specifier}")
    possible = [x for x in supported if all(_overlap(specifier, x) for _, specifier in requirements)]
    install = " or ".join(f"'{package}{x}'" for x in joined(possible))
    return Reason("unsupported-version", versions=install)


def joined(specifiers: list[str]) -> list[str]:
    """Specifiers, newest first, with those of the form ">=a,<b" joined where one ends at the version
    that another begins with.
    """
    ranges: list[str] = []
    for specifier in specifiers:
        if ranges and "," in specifier and specifier.split(",<")[1] == ranges[-1].split(",")[0].removeprefix(">="):
            ranges[-1] = f"{specifier.split(',')[0]},{ranges[-1].split(',')[1]}"
        else:
            ranges.append(specifier)
    return ranges


def _requirements_on(package: str, version: str) -> list[tuple[str, SpecifierSet]]:
    """Installed distributions that require a package and accept its version, with what they require."""
    return [
        (distribution, requirement.specifier)
        for distribution, requirement in _requirements(tuple(sys.path))
        if canonicalize_name(requirement.name) == package
        and requirement.specifier.contains(version, prereleases=True)
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]


@functools.cache
def _requirements(path: tuple[str, ...]) -> list[tuple[str, Requirement]]:
    """What the distributions on a path require. Every trainer asks for it, and reading it takes a tenth of a second."""
    found = []
    for distribution in importlib.metadata.distributions(path=list(path)):
        for text in distribution.requires or ():
            with suppress(InvalidRequirement):
                found.append((distribution.name, Requirement(text)))
    return found


def _overlap(specifier: SpecifierSet, other: str) -> bool:
    """Whether two specifiers have a version in common. The other one has bounds on both sides.

    Of each minor version, its first patch release and a late one are compared.
    """
    both, ends = specifier & SpecifierSet(other), [Version(x.version).major for x in SpecifierSet(other)]
    majors = range(min(ends), max(ends) + 1)
    return any(both.contains(f"{x}.{minor}.{patch}") for x in majors for minor in range(100) for patch in (0, 999))
