"""The benchmark suites, by name."""

from benchmarks.suites import (
    accumulated,
    attention,
    evaluation,
    grpo,
    head,
    host,
    hybrid,
    kto,
    llamafactory,
    loss,
    memory,
    online,
    precompute,
    reward,
    step,
    vision,
)

_MODULES = (
    step,
    hybrid,
    evaluation,
    precompute,
    online,
    kto,
    grpo,
    accumulated,
    reward,
    vision,
    llamafactory,
    head,
    loss,
    attention,
    host,
    memory,
)
SUITES = {module.SUITE.name: module.SUITE for module in _MODULES}
