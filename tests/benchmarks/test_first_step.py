"""The first step by its parts."""

from benchmarks import first_step
from benchmarks.cases import SUBJECT
from benchmarks.first_step import COMPILING, PARTS, PROBE, REST, Clock
from benchmarks.suites.step import STOCK

PROGRAM = """
from benchmarks import first_step

del first_step.SIDES[first_step.UNTUNED]
first_step.in_new_process = lambda run, variables: run()
first_step.main(["--quick", "--threads", "1", "--json", {out!r}])
"""


def test_a_part_does_not_contain_those_within_it(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(first_step, "now", lambda: float(next(ticks)))
    clock = Clock()
    inner = clock.timed(COMPILING, lambda: None)  # a second each

    def outer() -> None:
        inner()
        clock.timed(PROBE, inner)()

    clock.timed(REST, outer)()
    assert clock.calls == {COMPILING: 2, PROBE: 1, REST: 1}
    assert clock.seconds == {COMPILING: 2.0, PROBE: 2.0, REST: 3.0}
    assert clock.seconds.total() == 7.0  # from the first tick to the last one


def test_the_command(measured):
    """The parts of the first step make up its time, and the probe of fastdpo is one of them."""
    result, printed = measured(PROGRAM)
    cases = result["cases"]
    assert [*cases] == [f"{name}, {state}" for name in (STOCK, SUBJECT) for state in ("cold", "warm")]
    for name, case in cases.items():
        assert 0 < sum(case["parts"].values()) <= case["seconds"]
        assert set(case["parts"]) <= {*PARTS}
        assert (PROBE in case["parts"]) == name.startswith(SUBJECT)
        assert len(case["later_seconds"]) == 3
    assert "| fastdpo, warm" in printed
