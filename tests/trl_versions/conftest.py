"""Tests for TRL 0.29 to 1.14, which `make test-trl-versions` installs. Other versions do not collect them."""

from importlib.metadata import version

from packaging.specifiers import SpecifierSet

collect_ignore_glob = [] if version("trl") in SpecifierSet(">=0.29,<1.15") else ["test_*.py"]
