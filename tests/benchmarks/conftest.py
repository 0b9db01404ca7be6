"""What tests of commands share that measure in processes of their own."""

import json

import pytest

from tests.support.programs.warm import run_program


@pytest.fixture
def measured(tmp_path):
    """Runs the text of a program, in which {out!r} stands for a path, and returns the JSON that it writes there, and
    what it prints.
    """

    def run(text: str) -> tuple[dict, str]:
        path, out = tmp_path / "program.py", tmp_path / "out.json"
        path.write_text(text.format(out=str(out)))
        done = run_program(path)
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text()), done.stdout

    return run
