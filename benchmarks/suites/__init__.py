"""The benchmark suites, by name."""

from benchmarks.suites import (
    accumulated,
    attention,
    grpo,
    head,
    host,
    kept,
    loss,
    memory,
    reward,
    step,
    trainers,
    vision,
)

_MODULES = grpo, accumulated, kept, reward, vision, head, loss, attention, host, memory
_ALL = (step.SUITE, *trainers.SUITES, *(module.SUITE for module in _MODULES))
SUITES = {suite.name: suite for suite in _ALL}
