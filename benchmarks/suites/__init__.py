"""The suites by name."""

from benchmarks.suites import evaluation, head, memory, online, precompute, scaling, step

SUITES = {module.SUITE.name: module.SUITE for module in (step, evaluation, precompute, online, head, memory, scaling)}
