"""Sizes of memory read alike in every option."""

import subprocess
import sys

import pytest

from fastdpo.commands.sizes import bytes_of


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("0", 0),
        ("1", 1),
        ("1073741824", 1 << 30),
        ("7B", 7),
        ("2KiB", 2048),
        ("2kb", 2000),
        ("1.5 GiB", 3 << 29),
        ("80GiB", 80 << 30),
        (" 80 GB ", 80 * 10**9),
        ("0.1TB", 10**11),
    ],
)
def test_sizes(size, expected):
    assert bytes_of("run", "memory_budget", size) == expected


@pytest.mark.parametrize("size", ["", "-1", "GiB", "1e9", "1 GiBs", "1.GiB", "nan", "0x10"])
def test_anything_else_is_an_error(size):
    with pytest.raises(ValueError) as caught:
        bytes_of("run", "memory_budget", size)
    assert str(caught.value) == f"run: memory_budget must be a number of bytes, or a size such as 80GiB; got {size!r}"


def test_the_option_of_a_program(tmp_path):
    (tmp_path / "plain.py").write_text("import json, os; print(json.loads(os.environ['FASTDPO_RUN'])['options'])")
    command = [sys.executable, "-m", "fastdpo", "run", "--memory-budget", "1GiB", tmp_path / "plain.py"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "{'memory_budget': 1073741824}\n"
