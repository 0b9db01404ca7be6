"""Prints how many random cases of each property have run."""

from tests.support import fuzzing


def pytest_terminal_summary(terminalreporter):
    if fuzzing.cases:
        terminalreporter.section("random cases")
        for line in fuzzing.summary():
            terminalreporter.write_line(line)
