"""The benchmark suites, by name."""

from benchmarks.suites import (
    a2po,
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
    tpo,
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
    tpo,
    a2po,
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
