"""The suites by name."""

from benchmarks.suites import head, memory, scaling, step

SUITES = {module.SUITE.name: module.SUITE for module in (step, head, memory, scaling)}
