"""Every command of `fastdpo` explains itself."""

import argparse
import shlex

import pytest

from fastdpo.__main__ import parsed, parser

(COMMANDS,) = (x.choices for x in parser()._actions if isinstance(x, argparse._SubParsersAction))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_an_example_that_parses(name):
    prefix, example = COMMANDS[name].epilog.split(": ", 1)
    assert prefix == "example"
    program, *arguments = shlex.split(example)
    assert program == "fastdpo"
    assert parsed(arguments).command == name
