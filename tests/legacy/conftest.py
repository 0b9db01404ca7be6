"""Tests for TRL < 0.29, which `make test-legacy` installs. Other versions do not collect them."""

from importlib.metadata import version

from packaging.version import Version

collect_ignore_glob = [] if Version(version("trl")) < Version("0.29") else ["test_*.py"]
