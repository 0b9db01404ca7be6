"""The suites by name."""

from benchmarks.suites import head, memory, online, precompute, scaling, step

SUITES = {module.SUITE.name: module.SUITE for module in (step, precompute, online, head, memory, scaling)}
